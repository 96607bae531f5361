"""The Mahalanobis distance of PPO's replies from the SFT model's, in the reward models' last hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.mahalanobis import Gaussian, shrunk_gaussian, squared_shift, whitened
from rlhf_cli.processes.distributed import World

NEAREST = 0.05
"""The unit of the figure is this quantile of the distances of single SFT replies from their mean."""
LEAST = 20
"""With fewer replies of the SFT model there is no figure."""


@dataclass(frozen=True)
class Home:
    """Where the replies of the policy before PPO are, among the features of the reward models."""

    gaussian: Gaussian
    """Fitted to every other reply."""
    unit: float
    """The NEAREST quantile of the other replies' distances from its mean."""

    def unfamiliarity(self, features: Tensor | None, world: World) -> dict[str, float]:
        """The distance of the centre of all processes' replies [own B, H] from home, in units; {} of fewer than two."""
        own = _finite(features)
        z = whitened(own, self.gaussian) if len(own) else own.new_zeros(0, len(self.gaussian.mean)).double()
        sums = torch.cat([z.sum(0), z.square().sum()[None], torch.tensor([float(len(z))])])[None]
        *total, squares, count = torch.cat(world.gather_tensors(sums)).sum(0).tolist()
        if count < 2:
            return {}
        squared = squared_shift(torch.tensor(total, dtype=torch.float64), squares, int(count))
        return {"response/unfamiliarity": max(squared, 0.0) ** 0.5 / self.unit}


def home_of(features: Tensor) -> Home | None:
    """The home of the SFT model's replies with these features [n, H]; None if they are too few, or all equal."""
    features = _finite(features)
    if len(features) < LEAST:
        return None
    gaussian = shrunk_gaussian(features[::2])
    unit = whitened(features[1::2], gaussian).norm(dim=1).quantile(NEAREST).item()
    return Home(gaussian, unit) if unit > 0 else None


def features_of_all(own: list[Tensor], world: World) -> Tensor:
    """The features [n, H] of all processes' replies, in the order of the prompts, from those of the own ones, [H]."""
    width = max(world.gather(len(own[0]) if own else 0))
    stacked = torch.stack(own) if own else torch.zeros(0, width)
    rows = world.interleave([list(part) for part in world.gather_tensors(stacked)])
    return torch.stack(rows) if rows else stacked


def _finite(features: Tensor | None) -> Tensor:
    """The rows of responses that have been scored; of reward models without features none."""
    return features[features.isfinite().all(1)] if features is not None and features.shape[1] else torch.zeros(0, 0)
