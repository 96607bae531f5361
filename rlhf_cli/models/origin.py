"""The model that another one starts from, and whether a model has adapters on its weights."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlhf_cli.files import digest_once, stored_dtype
from rlhf_cli.run.artifacts import is_adapter

CACHED = "models--"
"""How the name of a model's folder in the hub's cache begins."""


def has_adapters(model: nn.Module) -> bool:
    """Whether LoRA adapters were added to this model and not merged."""
    return any(".lora_" in name for name, _ in model.named_parameters())


@dataclass(frozen=True)
class BaseModel:
    """A model that another one starts from: the model under adapters, or whose weights are trained."""

    path: str
    """A directory or a hub id."""
    revision: str | None = None

    def recorded(self) -> BaseModel:
        """The base as adapters name it, so that they can be moved with it or published.

        A folder of the hub's cache becomes the hub id and revision. A folder below the working directory is given
        relative to that, as PEFT looks it up; it begins with `./`, or PEFT might take it for a hub id. A name in the
        base's own config.json is not used: after more training it often names another model.
        """
        folder = Path(self.path)
        if not folder.is_dir():
            return self
        *_, repository, snapshots, revision = ("", "", *folder.resolve().parts)
        if snapshots == "snapshots" and repository.startswith(CACHED):
            return BaseModel(repository.removeprefix(CACHED).replace("--", "/", 1), revision)
        if folder.resolve().is_relative_to(Path.cwd()):
            return BaseModel(f"./{folder.resolve().relative_to(Path.cwd())}", self.revision)
        return BaseModel(str(folder.resolve()), self.revision)

    def digest(self) -> str:
        """A digest of the weights; of a hub model, its name and revision."""
        folder = Path(self.path)
        if not folder.is_dir():
            return f"hub:{self.path}@{self.revision or 'main'}"
        digest = hashlib.sha256()
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{file.name}\0{digest_once(file)}\n".encode())
        return digest.hexdigest()

    def dtype(self) -> str | None:
        """The number format of the weights, such as `bfloat16`; for adapters, their base's. None if unknown."""
        if is_adapter(self.path):
            from rlhf_cli.models.adapter_files import read_adapter

            adapter = read_adapter(self.path)
            assert adapter is not None
            return adapter.base.dtype()
        if Path(self.path).is_dir():
            return stored_dtype(self.path)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            with contextlib.suppress(OSError):
                return stored_dtype(Path(str(cached_file(self.path, name, revision=self.revision))).parent)
        return None
