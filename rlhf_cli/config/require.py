"""The conditions under which a stage starts: figures of earlier stages, each with its limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from rlhf_cli.config.base import Section
from rlhf_cli.config.quoting import did_you_mean

FIGURES = {
    "sft": ("loss", "perplexity", "token_accuracy"),
    "rm": (
        *("accuracy", "loss", "margin", "gold_accuracy", "length_baseline", "shorter_baseline", "pair_accuracy"),
        *("mse", "target_variance", "pearson", "spearman"),
        *("base_rate", "brier", "brier_baseline", "calibration_error", "num_rows"),
    ),
}
"""The held-out figures of the manifests, without `eval/`. A reward model has the figures of its loss, and `probe/NAME`.
With several sources of held-out rows, a source has `loss/NAME`, `accuracy/NAME` or `mse/NAME`."""
ENDS = {"lower": "_low95", "upper": "_high95"}
"""What a manifest appends to the name of a figure for each end of its 95 % interval."""


def _figure_name(name: str) -> str:
    stage, _, figure = name.partition("/")
    if stage not in FIGURES or not figure:
        raise ValueError("must be sft/ or rm/ and the name of a held-out figure, for example rm/accuracy")
    known, short = FIGURES[stage], figure.removeprefix("eval/").removesuffix(ENDS["lower"]).removesuffix(ENDS["upper"])
    if short.partition("/")[0] not in known and not (stage == "rm" and figure.startswith("probe/")):
        raise ValueError(f"no such figure; {stage} has {', '.join(known)}{did_you_mean(short, known)}")
    return name


FigureName = Annotated[str, AfterValidator(_figure_name)]


class Requirement(Section):
    """A limit for one held-out figure of an earlier stage."""

    above: float | None = None
    """The figure must be above this."""
    below: float | None = None
    """The figure must be below this."""
    interval: Literal["lower", "mean", "upper"] = "mean"
    """What is compared: the figure itself, or the lower or upper end of its 95 % interval. `lower` with `above` asks
    for evidence: too few held-out rows fail it too."""

    def rules(self) -> Iterator[str]:
        if self.above is None and self.below is None:
            yield "has no limit. Set above, below or both"
        if self.above is not None and self.below is not None and self.above >= self.below:
            yield f"no figure is above {self.above:g} and below {self.below:g}"
