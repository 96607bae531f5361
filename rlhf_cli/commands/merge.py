"""`rlhf merge`: turn adapters into plain weights that any program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhf_cli.errors import ArtifactError
from rlhf_cli.printing import say
from rlhf_cli.run.artifacts import is_adapter, model_directory, new_folder, require_new


def merge(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A finished stage, or a directory of adapters.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option("--dtype", help="Number format of the weights: auto is bfloat16 if the base model is."),
    ] = "auto",
) -> None:
    """Merge LoRA adapters into plain weights (stages with lora.save: adapter)."""
    path = model_directory(directory)
    if not is_adapter(path):
        raise ArtifactError(
            f"{path}: has no adapters (adapter_config.json) to merge. If it is a model, use it as it is"
        )
    require_new(out)

    from rlhf_cli.models.adapter_files import read_adapter
    from rlhf_cli.models.exporting import load_model
    from rlhf_cli.models.load import load_tokenizer
    from rlhf_cli.models.save import save

    adapter = read_adapter(path)
    assert adapter is not None
    if dtype == "auto":
        dtype = "bfloat16" if adapter.base.dtype() == "bfloat16" else "float32"
    model = load_model(path, dtype, heads_in_float32=True)
    with new_folder(out) as folder:
        save(model, load_tokenizer(path), folder, dtype)
    say(f"{out}: {adapter.base.path} with the adapters of {path}, {model.num_parameters():,} parameters in {dtype}")
