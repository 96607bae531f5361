"""A small project as a user would have it: data files and three configs; and commands, run in this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from rlhf_cli.cli import app
from support.tiny import write_jsonl

TEXT = "the tent lamp radio is late broken please help thank you we will send a new one today"
WORDS = TEXT.split()


def sentence(number: int, words: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(words))


DEMONSTRATIONS = [{"prompt": sentence(i, 4), "response": " " + sentence(i + 3, 5)} for i in range(40)]
PREFERENCES = [
    {"prompt": sentence(i, 4), "chosen": " " + sentence(i, 6), "rejected": " " + sentence(i + 1, 3)} for i in range(40)
]


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    common = {"artifacts": str(folder / "run"), "optimizer": {"learning_rate": 1e-3}}
    training = {"num_steps": 2, "minibatch_size": 4}
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        "sft": {
            **common,
            "model": {
                "scratch": {"config": {**tiny, "max_position_embeddings": 128}, "tokenizer": {"vocab_size": 300}}
            },
            "data": {"train": str(folder / "sft.jsonl"), "max_length": 64},
            "training": training,
            "evaluation": {"num_samples": 0},
        },
        "rm": {
            **common,
            "data": {"train": str(folder / "pref.jsonl"), "max_length": 64},
            "training": training,
            "evaluation": {"num_normalization_samples": 4, "max_new_tokens": 4},
        },
        "ppo": {
            **common,
            "data": {"train": str(folder / "sft.jsonl"), "max_prompt_length": 48},
            "rollout": {"max_new_tokens": 4},
            "ppo": {"num_iterations": 1, "rollout_batch_size": 4, "minibatch_size": 4},
            "evaluation": {"num_prompts": 4},
        },
    }


FACTS: dict[str, Any] = {"identity": {"config": {}, "data": {}, "inputs": {}}, "metrics": {}, "seed": 0, "versions": {}}
FACTS |= {"device": "cpu", "num_processes": 1, "seconds": 1.0, "finished": "2026-01-01T00:00:00+00:00"}
"""What a manifest says beside the stage and its files."""


def write_manifest(directory: Path, stage: str, **facts: Any) -> None:
    """The directory of a finished stage without files."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest = {"stage": stage, "files": {}, **FACTS, **facts}
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def write_project(folder: Path) -> None:
    write_jsonl(folder / "sft.jsonl", DEMONSTRATIONS)
    write_jsonl(folder / "pref.jsonl", PREFERENCES)
    for stage, config in configs(folder).items():
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "run").rglob("*"))
        if path.is_file() and not path.relative_to(folder / "run").parts[0].startswith(".")
    }


def rlhf(*arguments, code=0, **options):
    """Run a command in this process. It ends with this exit code, and with no other exception."""
    result = CliRunner().invoke(app, list(map(str, arguments)), **options)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def refused(*arguments, code=2, **options):
    """The only line of a command that is refused."""
    result = rlhf(*arguments, code=code, **options)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing more bytes than this to a file fails: like a full disk, for programs in Rust, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, handler)


def fails(project: Path, stage: str, *arguments: str) -> str:
    """Run a stage that must fail with exit code 2, no traceback and unchanged finished stages; return stderr."""
    before = digests(project)
    result = rlhf(stage, "--config", project / f"{stage}.yaml", "--quiet", *arguments, code=2)
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert digests(project) == before
    return result.stderr.strip().removeprefix("error: ")
