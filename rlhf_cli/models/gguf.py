"""GGUF files by llama.cpp's own programs, `convert_hf_to_gguf.py` and `llama-quantize`, where they are on the PATH."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_cli.errors import ConfigError
from rlhf_cli.models import gguf_converter
from rlhf_cli.program import install_extra

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}
"""What the converter calls the number formats that it writes. QUANTIZER writes the others."""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
BYTE_LEVEL = {**BYTES, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
QWEN2 = {
    "type": "Split",
    "pattern": {
        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    },
}
PRE_TOKENIZERS: dict[str, tuple[str | None, list[dict[str, Any]]]] = {
    "gpt-2": (None, [BYTE_LEVEL]),
    "smollm": (None, [DIGITS, BYTE_LEVEL]),
    "qwen2": ("NFC", [QWEN2, BYTES]),
}
"""llama.cpp's name -> the normalizer and the pre-tokenizers in a tokenizer.json that split text in the same way
(src/llama-vocab.cpp)."""


def require_llama_cpp(quantize: str | None) -> None:
    """Raise ConfigError if a program or a package that writes such a file is missing."""
    programs = [CONVERTER] if quantize is None or quantize in TYPES else [CONVERTER, QUANTIZER]
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"--format gguf: {program} of llama.cpp is not on the PATH. Install llama.cpp, or clone it and add its "
                "folder (for llama-quantize its build/bin) to the PATH"
            )
    missing = [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        install = install_extra("gguf", " ".join(missing))
        raise ConfigError(
            f"--format gguf: llama.cpp's converter needs the package {' and '.join(missing)} (extra gguf). Install it: "
            f"{install}"
        )


def convert(folder: Path, out: Path, kind: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Convert a model directory, whose config.json may be changed, to the file `out` with a model of this `name`.

    `kind` is a key of `TYPES`, or another type of `llama-quantize`. Raises ConfigError with llama.cpp's own reason.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") == "gpt2":  # the converter reads a key that transformers no longer writes
        path.write_text(json.dumps({"n_ctx": config["n_positions"]} | config), encoding="utf-8")
    first = out if kind in TYPES else out.with_suffix(".first")
    script = shutil.which(CONVERTER)
    assert script is not None
    runner = [sys.executable, str(Path(gguf_converter.__file__)), pre_tokenizer(tokenizer) or "", script]
    options = ["--outfile", str(first), "--outtype", TYPES.get(kind, "f32"), "--model-name", name]
    _run(CONVERTER, [*runner, str(folder), *options])
    if first != out:
        _run(QUANTIZER, [QUANTIZER, str(first), str(out), kind.upper()])
        first.unlink()


def _run(program: str, command: list[str]) -> None:
    """Run `program` of llama.cpp silently; raise ConfigError with the last line of its output if it fails."""
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    reason = lines[-1].removeprefix("ERROR:hf-to-gguf:")[:300] if lines else f"exit code {done.returncode}"
    raise ConfigError(f"--format gguf: {program} of llama.cpp failed ({reason})")


def pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """llama.cpp's name of a byte-level BPE's pre-tokenizer; None for one that only its converter may know.

    The converter recognizes tokenizers by the ids of a test sentence, so it knows none that you trained.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    if parts["model"].get("type") != "BPE" or parts["model"].get("ignore_merges"):
        return None
    normalizer, splitter = (parts["normalizer"] or {}).get("type"), parts["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter])
    for name, (its_normalizer, known) in PRE_TOKENIZERS.items():
        same = len(steps) == len(known) and all(a.items() <= b.items() for a, b in zip(known, steps, strict=True))
        if same and normalizer == its_normalizer:
            return name
    return None
