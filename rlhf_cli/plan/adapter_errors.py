"""Mistakes about adapters, found from configs before a run reads rows, samples, or writes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from transformers import AutoConfig

from rlhf_cli.config.by_stage import AnyConfig
from rlhf_cli.config.models import Lora
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.hub import is_local
from rlhf_cli.models.adapter_files import BaseModel, read_adapter
from rlhf_cli.models.adapters import import_peft, require_targets
from rlhf_cli.models.load import ensure_pad_token, load_tokenizer
from rlhf_cli.models.lora import refuse_adapter_as_base, require_loadable
from rlhf_cli.models.quantized import require_quantizable
from rlhf_cli.models.save import base_of
from rlhf_cli.plan.origins import ModelOrigin, ModelOrigins
from rlhf_cli.plan.shapes import built
from rlhf_cli.run.artifacts import model_directory


def require_adapters(config: AnyConfig, stages: Mapping[str, AnyConfig] | None = None, *, here: bool = True) -> None:
    """Raise the errors about adapters that the stage would raise after it has loaded models and rows.

    A model that cannot be found or built is left to the stage. `stages` are the configs of the run's stages. For a
    plan, `here` is False: packages and the hub do not matter.

    Raises ConfigError for adapters that cannot be trained or saved, and ArtifactError for adapters that cannot be read.
    """
    origins = ModelOrigins(stages or {})
    section, model = config.trained
    base = base_of(config)
    starts = [partial(origins.start, config)]
    if model.lora is not None:
        _require(f"{section}.lora", model.lora, base, starts, isinstance(config, RMConfig), here=here)
    if isinstance(config, PPOConfig) and config.ppo.has_value_model and (lora := config.value_model.lora) is not None:
        value = config.value_model
        starts = [*(starts if value.path is None else []), partial(origins.value_model, config)]
        base = base if value.path is None else BaseModel(value.path)
        _require("value_model.lora", lora, base, starts, True, here=here)
    for directory in (model_directory(path) for path, _ in config.inputs.values()):
        if read_adapter(directory) is not None and here:
            import_peft(f"{directory}:", ArtifactError)


def _require(
    key: str,
    lora: Lora,
    base: BaseModel,
    starts: Sequence[Callable[[], ModelOrigin]],
    is_classifier: bool,
    *,
    here: bool,
) -> None:
    """Raise what is wrong with adapters on every model that they may be trained on: only the run can tell which."""
    if here and not is_local(base.path) and not Path(base.path).exists():
        with contextlib.suppress(Exception):  # for `ModelOrigins`, which reads the cache alone
            AutoConfig.from_pretrained(base.path, revision=base.revision, trust_remote_code=False)
    errors = []
    for start in starts:
        try:
            origin = start()
            model = built(origin.config, is_classifier, key)
        except (ArtifactError, ConfigError):
            return
        try:
            require_targets(model, lora, key)
            if lora.quantize is not None:
                require_quantizable(model, lora.quantize, f"{key}.quantize", here=here)
            if lora.save == "adapter" and origin.has_adapters:
                refuse_adapter_as_base(base.path, key)
            if lora.save == "adapter" and key == "model.lora" and Path(base.path).is_dir():
                if is_classifier:
                    ensure_pad_token(model, load_tokenizer(base.path))
                require_loadable(model, lora, base, key)
        except ConfigError as error:
            errors.append(error)
        else:
            return
    raise errors[0]
