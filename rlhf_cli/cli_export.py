"""The command `rlhf export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhf_cli.cli_data import Device
from rlhf_cli.cli_options import Quiet, StageOfRun, exit_with


def export(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any model.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    stage: StageOfRun = None,
    format: Annotated[
        Literal["safetensors", "adapter", "gguf"],
        typer.Option("--format", help="A Hugging Face model, LoRA adapters alone, or a GGUF file by llama.cpp."),
    ] = "safetensors",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option("--dtype", help="Number format; that of the run's base model by default.", show_default=False),
    ] = None,
    quantize: Annotated[
        Literal["int8", "int4", "q8_0", "q6_k", "q5_k_m", "q4_k_m"] | None,
        typer.Option("--quantize", help="int8 and int4 by torchao, the others for GGUF.", show_default=False),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file of weights; 5GB by default.")
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not compare the result with the original on held-out rows.")
    ] = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Write a trained model for other programs, and measure what that cost."""

    def work() -> None:
        from rlhf_cli.commands.export import Options
        from rlhf_cli.commands.export import export as write

        options = Options(format, dtype, quantize, max_shard_size, not no_check, device)
        write(directory, out, stage, options, quiet=quiet)

    exit_with(work)
