"""`rlhf export`: a trained model as a folder for other programs, with what the export cost in quality beside it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_cli.commands.options import Device, Quiet, StageOfRun
from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from rlhf_cli.files import digest_file
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import MANIFEST, model_directory, new_folder, require_new, stage_directory
from rlhf_cli.trained.locate import StageModel, is_model, locate

if TYPE_CHECKING:
    from rlhf_cli.evaluation.fidelity import Check, Comparison
    from rlhf_cli.models.exporting import Dtype
    from rlhf_cli.run.model_card import Origin
    from rlhf_cli.trained.model import Prompting

Format = Literal["safetensors", "adapter", "gguf"]
Quantization = Literal["int8", "int4", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]
TORCHAO = ("int8", "int4")
SHARD_SIZE = "5GB"
SEED = 0  # the seed of the comparison with the original
FILE = "export.json"  # what was exported, from what, and the figures of both models


@dataclass(frozen=True)
class ExportOptions:
    format: Annotated[
        Format,
        typer.Option("--format", help="A Hugging Face model, LoRA adapters alone, or a GGUF file by llama.cpp."),
    ] = "safetensors"
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option("--dtype", help="Number format; that of the run's base model by default.", show_default=False),
    ] = None
    quantize: Annotated[
        Quantization | None,
        typer.Option("--quantize", help="int8 and int4 by torchao, the others for GGUF.", show_default=False),
    ] = None
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file of weights; 5GB by default.")
    ] = None
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not compare the result with the original on held-out rows.")
    ] = False
    device: Device = "auto"

    def require_fitting(self) -> None:
        """Raise ConfigError for options that exclude each other."""
        kind = self.quantize
        if self.format == "adapter" and kind is not None:
            raise ConfigError("--quantize: adapters are not quantized. Remove one of --quantize and --format adapter")
        if self.format == "gguf" and kind in TORCHAO:
            raise ConfigError(f"--quantize {kind}: is a format of torchao. For GGUF give q8_0 or q4_k_m")
        if self.format == "safetensors" and kind is not None and kind not in TORCHAO:
            raise ConfigError(f"--quantize {kind}: is a format of GGUF files. Add --format gguf, or give int8")
        if self.format == "gguf" and kind is not None and self.dtype is not None:
            raise ConfigError("--dtype: does nothing with --quantize in a GGUF file. Remove one of them")
        if self.max_shard_size is None:
            return
        if self.format != "safetensors":
            raise ConfigError(f"--max-shard-size: does nothing with --format {self.format}. Remove one of them")
        if re.fullmatch(r"[1-9]\d*[KMGT]B", self.max_shard_size) is None:
            raise ConfigError(f"--max-shard-size: {self.max_shard_size}, must be a size such as 500MB or 5GB")


@dataclass(frozen=True)
class ModelGiven:
    path: str
    located: StageModel | None = None  # the stage that it belongs to; None for a model of no run

    @property
    def name(self) -> str:
        return Path(self.path).resolve().name if self.located is None else self.located.title

    def base(self) -> Origin | None:
        """The model that the run started from; None for random weights and for a model of no run."""
        if self.located is None:
            return None
        from rlhf_cli.config.by_stage import load_stage_config
        from rlhf_cli.run.model_card import base_model

        root, stage = self.located.root, self.located.stage
        file = stage_directory(root, stage) / "config.yaml"
        config: Any = load_stage_config(stage, file)
        return base_model(config, root)

    def dtype(self, options: ExportOptions) -> tuple[Dtype, str]:
        """The number format to write, and a remark where it was not chosen."""
        from rlhf_cli.models.exporting import dtype_of

        if options.dtype is not None or options.format == "adapter":
            return options.dtype or "float32", ""
        if options.format == "gguf" and options.quantize is not None:
            return "float32", ""  # llama.cpp rounds once
        base = self.base()
        if base is not None and (dtype := dtype_of(base.path, base.revision)) is not None:
            return dtype, ", like its base model"
        return dtype_of(self.path) or "float32", ""


def export(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any model.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    options: ExportOptions,
    stage: StageOfRun = None,
    quiet: Quiet = False,
) -> None:
    """Write a trained model for other programs, and measure what that cost."""
    options.require_fitting()
    source = source_of(directory, stage)
    require_new(out)
    display = Display("export", quiet=quiet)

    from rlhf_cli.evaluation.fidelity import COLUMNS, rows_of
    from rlhf_cli.evaluation.figures import as_json
    from rlhf_cli.models.exporting import adapter_directory, load_exported, require_torchao
    from rlhf_cli.models.gguf import require_llama_cpp
    from rlhf_cli.run.model_card import library_versions
    from rlhf_cli.trained.model import TEMPLATE_FILE, prompting_of

    if options.format == "adapter":
        adapter_directory(source.path)
    if options.format == "gguf":
        require_llama_cpp(options.quantize)
    elif options.quantize is not None:
        assert options.quantize in ("int8", "int4")
        require_torchao(options.quantize)
    prompting = prompting_of(source.located)
    check = _check(source, options, display)
    with new_folder(out) as folder:
        dtype, note = source.dtype(options)
        template = prompting.chat_template if prompting is not None else None
        parameters, gguf_file = _write(source, folder, out, options, dtype, template)
        if template is not None and gguf_file is None:  # a GGUF file has it inside
            (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        found = None
        if check is not None:
            display.note(f"comparing {source.name} on {check.about}")
            try:
                found = check.compare(load_exported(folder, check.model, gguf_file=gguf_file))
            except ArtifactError as error:
                if gguf_file is None:
                    raise
                display.warn(f"{gguf_file} is not compared with the original ({error})")  # transformers can't read it
        written_as = {"safetensors": "", "adapter": "adapters", "gguf": "GGUF "}[options.format]
        if options.format != "adapter":
            written_as += options.quantize or dtype
        if options.quantize in TORCHAO:
            written_as += f" with {dtype}"
        facts: dict[str, Any] = {"model": source.name, "written_as": written_as, "parameters": parameters}
        own_dtype = options.dtype if options.format == "adapter" else dtype
        facts |= {"format": options.format, "dtype": own_dtype, "quantize": options.quantize}
        if source.located is not None:
            manifest = stage_directory(source.located.root, source.located.stage) / MANIFEST
            facts |= {"stage": source.located.stage, "manifest": digest_file(manifest)}
        if check is not None and found is not None:
            facts |= {"compared_on": check.about, "seed": SEED}
            facts |= {side: as_json(figures) for side, figures in found.items()}
        facts |= {"versions": library_versions()}
        facts |= {"prompts": prompting.sentence} if prompting is not None else {}
        text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / FILE).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(_card(source, options, facts, found, prompting), encoding="utf-8")
    if check is not None and found is not None:
        display.table(f"{source.name}, as trained and as {written_as}: {check.about}", COLUMNS, rows_of(found))
    size = sum(file.stat().st_size for file in out.iterdir())
    display.note(f"{out}: {source.name} as {written_as}{note}, {size / 1e6:,.1f} MB")


def source_of(directory: str, stage: str | None) -> ModelGiven:
    """The model of `stage` of a run, or of the last finished one of ppo, sft and rm; a model directory as it is.

    Raises ArtifactError if the stage is not finished.
    """
    located = locate(directory, stage, default=("ppo", "sft", "rm"))
    if located is not None:
        return ModelGiven(located.path, located)
    if stage is not None:
        raise ConfigError(f"--stage: {directory} is a model and not a run. Remove the option")
    return ModelGiven(model_directory(directory))


def _write(
    source: ModelGiven, folder: Path, out: Path, options: ExportOptions, dtype: Dtype, template: str | None
) -> tuple[int, str | None]:
    """Write weights and what belongs to them, but no card. Returns the number of parameters, and a GGUF file's name."""
    from rlhf_cli.models import exporting, gguf
    from rlhf_cli.models.load import load_tokenizer
    from rlhf_cli.trained.model import TEMPLATE_FILE

    if options.format == "adapter":
        return exporting.write_adapter(source.path, folder, options.dtype, out), None
    if options.format == "safetensors":
        size = options.max_shard_size or SHARD_SIZE
        if options.quantize is None:
            return exporting.write_model(source.path, folder, dtype, size), None
        assert options.quantize in ("int8", "int4")
        return exporting.write_quantized(source.path, folder, dtype, options.quantize, size), None
    kind = options.quantize or dtype
    name = f"{source.name}-{gguf.TYPES.get(kind, kind).upper()}.gguf"
    with tempfile.TemporaryDirectory(dir=folder) as plain:
        parameters = exporting.write_model(source.path, Path(plain), dtype, "50GB")
        if template is not None:
            Path(plain, TEMPLATE_FILE).write_text(template, encoding="utf-8")
        card = Path(source.path) / "README.md"
        if card.is_file():  # The converter copies its licence and base model.
            shutil.copyfile(card, Path(plain) / card.name)
        gguf.convert(Path(plain), folder / name, kind, source.name, load_tokenizer(plain))
    return parameters, name


def _check(source: ModelGiven, options: ExportOptions, display: Display) -> Check | None:
    """The comparison with the original, with its data read; None without a run or with --no-check."""
    if options.no_check:
        return None
    located = source.located
    if located is None or located.folder == "value_model":
        if located is not None or is_model(Path(source.path)):  # else the path is wrong, and that is the error
            display.note(f"{source.path} is not compared: it is not a language model or reward model of a run")
        return None
    from rlhf_cli.evaluation.fidelity import PolicyCheck, RewardModelCheck
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.run import open_run

    try:
        run = open_run(located.root, stage=None, device=start(options.device).device, seed=SEED)
        check = (RewardModelCheck if located.stage == "rm" else PolicyCheck)(run, located.path)
    except (ArtifactError, DataError) as error:
        if type(error) not in (ArtifactError, DataError):  # Those about a stage say themselves what to do.
            raise
        raise type(error)(f"{error}. Or export without figures: --no-check") from None
    if not check.about:
        display.note(f"{source.path} is not compared: the run has no held-out rows")
    return check if check.about else None


def _card(
    source: ModelGiven,
    options: ExportOptions,
    facts: dict[str, Any],
    found: Comparison | None,
    prompting: Prompting | None,
) -> str:
    """The model card of the stage, with sections about its prompts and about the export."""
    card = Path(source.path) / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else f"# {source.name}\n"
    for key, whole, adapter in (
        ("library_name", "transformers", "peft"),
        ("base_model_relation", "finetune", "adapter"),
    ):
        old, new = (whole, adapter) if options.format == "adapter" else (adapter, whole)
        text = text.replace(f"{key}: {old}", f"{key}: {new}", 1)
    sections = [text.rstrip("\n"), *([prompting.section] if prompting is not None else [])]
    from rlhf_cli.evaluation.fidelity import rows_of

    about = f"## Export\n\nWritten by `rlhf export` as {facts['written_as']}."
    if found is None:
        return "\n\n".join([*sections, about]) + "\n"
    about += (
        f" Compared with the model as it was trained on {facts['compared_on']}, both computed in float32. KL is "
        "that of the original to the export, in nats."
    )
    rows = ["| | original | exported | difference |", "|---|---|---|---|"]
    rows += [f"| {' | '.join(row)} |" for row in rows_of(found)]
    return "\n\n".join([*sections, about, "\n".join(rows)]) + "\n"
