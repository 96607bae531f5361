"""`rlhf merge`: turn adapters into plain weights, or several reward models into their mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.printing import say
from rlhf_cli.run.artifacts import (
    is_adapter,
    model_directory,
    new_folder,
    read_manifest,
    require_intact,
    require_new,
    stage_directory,
)
from rlhf_cli.trained.locate import locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAME_ORIGIN = 0.5
"""The cosine of the weights of two models that were trained from one is larger. Other random weights have one of 0."""

Dtype = Literal["auto", "float32", "bfloat16"]


def merge(
    models: Annotated[
        list[str],
        typer.Argument(metavar="DIR OUT | RM RM...", help="Adapters and the folder, or reward models."),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write the mean of the models to.")] = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Number format of the weights: auto is bfloat16 if the base model is.")
    ] = "auto",
) -> None:
    """Merge LoRA adapters into plain weights, or with --out average the weights of reward models."""
    if out is None and len(models) == 2:
        _merge_adapters(model_directory(models[0]), Path(models[1]), dtype)
    elif out is None or len(models) < 2:
        raise ConfigError("give adapters and a folder, DIR OUT, or two or more reward models and --out OUT")
    else:
        require_new(out)
        _average([model_directory(path) for path in models], out, dtype)


def _merge_adapters(path: str, out: Path, dtype: Dtype) -> None:
    if not Path(path).is_dir():
        raise ArtifactError(f"{path}: no such directory. Give adapters, or reward models and --out OUT")
    if not is_adapter(path):
        raise ArtifactError(
            f"{path}: has no adapters (adapter_config.json) to merge. Use the model as it is, or give --out OUT for "
            "the mean of reward models"
        )

    from rlhf_cli.models.exporting import dtype_of, load_model
    from rlhf_cli.models.load import check_vocabulary, load_tokenizer
    from rlhf_cli.models.save import save

    if dtype == "auto":
        dtype = "bfloat16" if dtype_of(path) == "bfloat16" else "float32"
    with new_folder(out) as folder:
        model, tokenizer = load_model(path, dtype, heads_in_float32=True), load_tokenizer(path)
        check_vocabulary(model, tokenizer, path)
        save(model, tokenizer, folder, dtype)
    say(f"{out}: {model.name_or_path} with the adapters of {path}, {model.num_parameters():,} parameters in {dtype}")


def _average(paths: Sequence[str], out: Path, dtype: Dtype) -> None:
    """Write the mean of reward models (WARM, arXiv 2401.12187). Raises ArtifactError for models whose mean is none."""
    import torch

    from rlhf_cli.models.exporting import dtype_of
    from rlhf_cli.models.heads import scalar_heads
    from rlhf_cli.models.load import CUTS, LENGTH_CURVE, load_reward_model, load_tokenizer, same_tokenizer
    from rlhf_cli.models.save import save

    for path in paths:
        require_intact(path, thorough=True)
    mean, tokenizer = load_reward_model(paths[0]), load_tokenizer(paths[0])
    start = {name: weight.detach().clone() for name, weight in mean.named_parameters()}
    heads = scalar_heads(mean)
    for number, path in enumerate(paths[1:], 2):
        other, theirs, names = load_reward_model(path), load_tokenizer(path), f"{path} and {paths[0]}"
        weights = {name: weight.detach() for name, weight in other.named_parameters()}
        if {k: w.shape for k, w in start.items()} != {k: w.shape for k, w in weights.items()}:
            raise ArtifactError(f"{names}: have weights of other names or shapes. Average models of one architecture")
        if not (same_tokenizer(tokenizer, theirs) and same_tokenizer(theirs, tokenizer)):
            raise ArtifactError(f"{names}: have other tokenizers. Average models that were trained from one model")
        if any(getattr(mean.config, key, None) != getattr(other.config, key, None) for key in CUTS):
            cuts = ", ".join(CUTS)
            raise ArtifactError(f"{names}: cut texts to other lengths ({cuts}). Train them with the same data")
        bodies = [name for name, weight in weights.items() if weight.ndim > 1 and name.rpartition(".")[0] not in heads]
        dot = sum(float((start[name] * weights[name]).sum()) for name in bodies)
        one, two = (sum(float(side[name].square().sum()) for name in bodies) ** 0.5 for side in (start, weights))
        cosine = dot / (one * two)
        if cosine < SAME_ORIGIN:
            raise ArtifactError(
                f"{names}: their weights have a cosine of {cosine:.2f}, so they were not trained from one model, and "
                "their mean is no model. Use them as an ensemble"
            )
        with torch.no_grad():
            for name, weight in weights.items():
                so_far = mean.get_parameter(name)
                so_far.add_((weight - so_far) / number)
    if dtype == "auto":
        dtype = "bfloat16" if dtype_of(paths[0]) == "bfloat16" else "float32"
    for key in ("score_mean", "score_std", LENGTH_CURVE):  # those of the first
        vars(mean.config).pop(key, None)
    lines = _measure(mean, tokenizer, paths[0])
    with new_folder(out) as folder:
        save(mean, tokenizer, folder, dtype)
    for line in lines:
        say(f"{out}: {line}")
    say(f"{out}: the mean of {len(paths)} models, {mean.num_parameters():,} parameters in {dtype}")


def _measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    """Lines about the mean, measured on the rows of the run that the first model belongs to."""
    place = locate(path)
    manifest = None if place is None else read_manifest(stage_directory(place.root, "rm"))
    if place is None or manifest is None:
        return [f"{path} belongs to no run, so the scores are not normalised and the accuracy is not known"]

    from rlhf_cli.evaluation.reward_model import measure_again
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.run import open_run

    run = open_run(place.root, stage="rm", device=start("auto").device, seed=manifest.seed)
    return measure_again(run, model, tokenizer)
