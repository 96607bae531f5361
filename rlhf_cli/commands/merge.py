"""`rlhf merge`: turn adapters into plain weights that any program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rlhf_cli.artifacts import is_adapter, model_directory, new_folder, require_new
from rlhf_cli.errors import ArtifactError
from rlhf_cli.printing import say


def merge(directory: str, out: Path, dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> None:
    """Write the model at `directory` (adapters, or a finished stage) with its adapters merged, as the folder `out`.

    The weights are written as `dtype`; `auto` is bfloat16 if the base model is, and float32 otherwise. The folder is
    complete or does not exist. Raises ArtifactError if `directory` has no adapters or `out` exists.
    """
    path = model_directory(directory)
    if not is_adapter(path):
        raise ArtifactError(
            f"{path}: has no adapters (adapter_config.json) to merge. If it is a model, use it as it is"
        )
    require_new(out)

    from rlhf_cli.models.adapter_files import read_adapter
    from rlhf_cli.models.exporting import load_model
    from rlhf_cli.models.load import load_tokenizer, save

    adapter = read_adapter(path)
    assert adapter is not None
    if dtype == "auto":
        dtype = "bfloat16" if adapter.base.dtype() == "bfloat16" else "float32"
    model = load_model(path, dtype, heads_in_float32=True)
    with new_folder(out) as folder:
        save(model, load_tokenizer(path), folder, dtype)
    say(f"{out}: {adapter.base.path} with the adapters of {path}, {model.num_parameters():,} parameters in {dtype}")
