"""Adapters in a directory: PEFT's format, and two files of ours beside it.

    adapter_config.json         peft.LoraConfig, with the base model's path or hub id (`BaseModel.recorded`)
    adapter_model.safetensors   the adapters, and the head of a sequence classifier
    model_config.json           the config.json of the whole model, with the statistics of a reward model's score
    base_model.json             path, revision and digest of the base model, and how it was quantized; for a local one
                                also its path from this directory, where it is looked up first

There is no config.json: with one, transformers would take the directory itself as the base model. transformers, PEFT
and vLLM load such a directory together with its base, and so does `load`, which merges the adapters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlhf_cli.config.models import Quantization
from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import digest_once, read_text, stored_dtype
from rlhf_cli.models.adapters import head_names, import_peft, inject, lora_of
from rlhf_cli.models.deferred import take
from rlhf_cli.processes.sharding import is_first_process, is_sharded, plain_class, whole
from rlhf_cli.run.artifacts import ADAPTER_CONFIG, MODEL_CONFIG, is_adapter, writing

WEIGHTS, BASE_MODEL = "adapter_model.safetensors", "base_model.json"
PREFIX = "base_model.model."
"""What PEFT writes before the names of weights."""
READ = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora", "rank_pattern"}
READ |= {"alpha_pattern", "layers_to_transform", "layers_pattern"}
"""Keys of adapter_config.json that say what the adapters compute."""
UNREAD = {"peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}
UNREAD |= {"peft_version", "init_lora_weights", "lora_dropout", "modules_to_save", "fan_in_fan_out", "loftq_config"}
UNREAD |= {"qalora_group_size", "runtime_config", "megatron_core"}
"""Keys that reading does not need (`modules_to_save` are among the weights). Any other key with a value is refused."""
MERGE_FIRST = "which is not supported. Merge the adapters with PEFT and give the result"


@dataclass(frozen=True)
class BaseModel:
    """A model that another one starts from: the model under adapters, or whose weights are trained."""

    path: str  # a directory or a hub id
    revision: str | None = None

    def recorded(self) -> BaseModel:
        """The base as adapters name it, so that they can be moved with it or published.

        A folder of the hub's cache becomes the hub id and revision. A path below the working directory is relative to
        it, as PEFT looks it up, and begins with `./`, or PEFT might take it for a hub id.
        """
        folder = Path(self.path)
        if not folder.is_dir():
            return self
        *_, repository, snapshots, revision = ("", "", *folder.resolve().parts)
        if snapshots == "snapshots" and repository.startswith("models--"):  # the hub's cache
            return BaseModel(repository.removeprefix("models--").replace("--", "/", 1), revision)
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
        if (adapter := read_adapter(self.path)) is not None:
            return adapter.base.dtype()
        if Path(self.path).is_dir():
            return stored_dtype(self.path)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            with contextlib.suppress(OSError):
                return stored_dtype(Path(str(cached_file(self.path, name, revision=self.revision))).parent)
        return None


def save_adapter(
    model: PreTrainedModel, directory: Path, base: BaseModel, quantization: Quantization | None = None
) -> None:
    """Write the adapters of a model, and the head of a classifier, in PEFT's format. `quantization` is the base's.

    All processes must call this for a sharded model; the first one writes.
    """
    heads = head_names(model)
    tensors = {
        PREFIX + _name_in_file(name): whole(parameter.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if ".lora_" in name or name.split(".")[0] in heads
    }
    if is_sharded(model) and not is_first_process():
        return
    lora = {**lora_of(model).to_dict(), "modules_to_save": heads or None, "inference_mode": True}
    model.config.architectures = [plain_class(model).__name__]
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        # The stage is built beside its final place, from which the base has the same relative path.
        about = AdapterDirectory(str(directory), base, lora, model.config.to_diff_dict(), quantization, {})
        about.write_about(directory, directory)


def _name_in_file(name: str) -> str:
    """The name that PEFT gives a weight of the adapter `default` in a file.

    >>> _name_in_file("model.q_proj.lora_A.default.weight"), _name_in_file("q.lora_magnitude_vector.default.weight")
    ('model.q_proj.lora_A.weight', 'q.lora_magnitude_vector')
    """
    return name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector").replace(".default.", ".")


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


@dataclass(frozen=True)
class AdapterDirectory:
    """Adapters that were found on disk."""

    path: str
    base: BaseModel
    lora: dict[str, Any]  # adapter_config.json
    model_config: dict[str, Any]  # model_config.json; empty if another program wrote the adapters
    quantization: Quantization | None  # of the base while the adapters were trained
    head: dict[str, tuple[int, ...]]  # the weights of a classifier's head and their shapes

    def write_about(self, directory: Path, final: Path) -> None:
        """Write everything but the weights into `directory`, which will be moved to `final`."""
        recorded, folder = self.base.recorded(), Path(self.base.path)
        relative = os.path.relpath(folder.resolve(), final.resolve()) if folder.is_dir() else None
        named = {"base_model_name_or_path": recorded.path, "revision": recorded.revision}
        about = {"path": recorded.path, "relative_path": relative, "revision": recorded.revision}
        about |= {"digest": self.base.digest(), "quantize": self.quantization}
        files = {ADAPTER_CONFIG: self.lora | named, BASE_MODEL: about, MODEL_CONFIG: self.model_config}
        for name, values in files.items():
            if values:
                text = json.dumps(values, indent=2, sort_keys=True, default=_as_json)
                (directory / name).write_text(text + "\n", encoding="utf-8")

    @property
    def is_classifier(self) -> bool:
        return self.lora.get("task_type") == "SEQ_CLS"

    @property
    def num_labels(self) -> int:
        """The outputs of the head's last layer: layers before it have more."""
        return min((shape[0] for shape in self.head.values() if len(shape) == 2), default=1)


def read_adapter(path: str) -> AdapterDirectory | None:
    """What a directory of adapters says; None for anything else. Raises ArtifactError if it cannot be used.

    The base model is looked up at its place relative to the adapters first: a moved or copied run finds its own.
    """
    if not is_adapter(path):
        return None
    folder = Path(path)
    lora, about, model_config = (_read_json(folder / name) for name in (ADAPTER_CONFIG, BASE_MODEL, MODEL_CONFIG))
    _refuse_unknown(path, lora)
    if not (folder / WEIGHTS).is_file():
        raise ArtifactError(f"{path}: has no {WEIGHTS}. Pickled adapters are never read: save them as safetensors")
    recorded, revision = lora.get("base_model_name_or_path"), lora.get("revision")
    if not isinstance(recorded, str) or not recorded:
        raise ArtifactError(f"{path}: {ADAPTER_CONFIG} names no base model (base_model_name_or_path). Add it")
    named = BaseModel(recorded, revision if isinstance(revision, str) else None)
    relative, digest = about.get("relative_path"), about.get("digest")
    beside = [BaseModel(os.path.normpath(folder.resolve() / relative))] if isinstance(relative, str) else []
    there = [base for base in (*beside, named) if Path(base.path).is_dir()]
    base = next((base for base in there if digest is None or base.digest() == digest), None)
    if there and base is None:
        raise ArtifactError(
            f"{folder}: its base model {there[0].path} has other weights than those that the adapters were trained on. "
            "Restore them, or train the adapters again"
        )
    if base is not None and Path(base.path).resolve() == folder.resolve():
        raise ArtifactError(f"{path}: {ADAPTER_CONFIG} names this folder as its own base model. Name that model")
    quantization = about.get("quantize")
    if quantization not in (None, *get_args(Quantization)):
        raise ArtifactError(f"{path}: {BASE_MODEL} has quantize: {str(quantization)[:40]}, which is unknown")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{folder / WEIGHTS}: cannot be read ({error})") from None
    head = {name.removeprefix(PREFIX): shape for name, shape in shapes.items() if ".lora_" not in name}
    adapted = {name.removeprefix(PREFIX).split(".")[0] for name in shapes if ".lora_" in name}
    if whole := [name for name in head if lora.get("task_type") != "SEQ_CLS" or name.split(".")[0] in adapted]:
        raise ArtifactError(f"{path}: has the whole weight {whole[0]} beside the adapters, {MERGE_FIRST}")
    return AdapterDirectory(path, base or named, lora, model_config, quantization, head)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file."""
    try:
        values = json.loads(read_text(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: cannot be read ({str(error)[:200]})") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: is not a JSON object")
    return values


def _refuse_unknown(path: str, lora: dict[str, Any]) -> None:
    """Raise ArtifactError for adapters that are not LoRA, or have a feature that merging would ignore."""
    if lora.get("peft_type") != "LORA":
        raise ArtifactError(f"{path}: {ADAPTER_CONFIG} has peft_type: {str(lora.get('peft_type'))[:40]}, not LORA")
    used = {key for key, value in lora.items() if value and (key, value) != ("bias", "none")}
    unknown = sorted(key[:40] for key in used - READ - UNREAD)
    if isinstance(start := lora.get("init_lora_weights", True), str) and start not in ("gaussian", "orthogonal"):
        unknown.append(f"init_lora_weights: {start[:40]}")  # PiSSA and others change the base model, too
    if unknown:
        raise ArtifactError(f"{path}: {ADAPTER_CONFIG} sets {', '.join(unknown)}, {MERGE_FIRST}")


@torch.no_grad()
def attach(model: PreTrainedModel, adapter: AdapterDirectory, *, with_head: bool) -> list[str]:
    """Add the adapters of a directory to their base model, with gradients as after `add_lora`.

    With `with_head` the head is read, too; returns the names of its weights. Raises ArtifactError if a weight is
    missing, does not fit or is not finite.
    """
    peft = import_peft(f"{adapter.path}:", ArtifactError)
    values = {key: adapter.lora[key] for key in READ if adapter.lora.get(key) is not None}
    try:
        inject(model, peft.LoraConfig(**values))
        given = {name.removeprefix(PREFIX): t for name, t in load_file(Path(adapter.path) / WEIGHTS).items()}
    except (ValueError, TypeError, KeyError, AttributeError, SafetensorError, OSError) as error:
        raise ArtifactError(f"{adapter.path}: cannot be added to {adapter.base.path} ({error})") from None
    needed = {_name_in_file(name): p for name, p in model.named_parameters() if ".lora_" in name}
    if with_head:
        needed |= {name: p for name, p in model.named_parameters() if name in adapter.head}
    given = {name: tensor for name, tensor in given.items() if with_head or name not in adapter.head}
    for name in sorted(needed.keys() | given.keys()):
        if name not in needed or name not in given or needed[name].shape != given[name].shape:
            raise ArtifactError(f"{adapter.path}: weight {name} does not fit {adapter.base.path}")
        if not given[name].isfinite().all():
            raise ArtifactError(f"{adapter.path}: weight {name} contains NaN or inf")
        needed[name].data = take(needed[name]).float()  # a head that the base has, too, may be deferred
        needed[name].copy_(given[name])
    return sorted(adapter.head) if with_head else []


def own_generation_config(path: str) -> GenerationConfig | None:
    """The generation config in a directory; None without one. transformers ignores one that it cannot read."""
    if not (Path(path) / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:
        raise ArtifactError(f"{path}/generation_config.json: cannot be read ({error})") from None
