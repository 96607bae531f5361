"""`rlhf compare`: the PPO policies of several runs on the same prompts, and what differs in their configs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.comparison import bradley_terry, wins
from rlhf_cli.algorithms.statistics import bootstrap_interval
from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.evaluation.figures import difference_figure, mean_figure, rate_figure, share_figure
from rlhf_cli.report.figure import Figure
from rlhf_cli.report.progress import Display
from rlhf_cli.report.run_data import evaluation_of, meaning_of, names_of, short_names
from rlhf_cli.report.tables import config_differences
from rlhf_cli.run.artifacts import Manifest, read_manifest, stage_directory
from rlhf_cli.trained.locate import finished_stages

SHOWN = ("score", "gold", "kl", "length")  # numbers of a reply that are compared, where all runs have them
JUDGED = ("score", "gold")  # those that may be rates, all 0 or 1
MOST_COLUMNS = 3  # with more runs than this, the table of wins has a column for the first run only
SEED = 0  # of the intervals
STRENGTH_RESAMPLES = 500
JUDGE_PRIOR = 0.5  # wins added for both sides where a judge compared them, so that strengths stay finite


@dataclass(frozen=True)
class Compared:
    """One run: its replies in `rlhf eval`'s file, and its manifests."""

    name: str
    root: Path
    replies: list[dict[str, Any]]
    manifests: dict[str, Manifest]
    seed: int | None = None  # `--seed` of `rlhf eval`, from which the replies were drawn

    def numbers(self, key: str) -> Tensor:
        """A number of PPO's reply to each prompt, [prompts]."""
        return torch.tensor([float(row["ppo"][key]) for row in self.replies], dtype=torch.float64)


def compare(roots: Sequence[Path]) -> None:
    """Print each run's figures, their differences from the first run, who wins, and what differs in the configs.

    Raises ArtifactError for a run without `rlhf eval`'s file, ConfigError for runs with other held-out prompts.
    """
    if len(roots) < 2:
        raise ConfigError("rlhf compare: takes two directories or more")
    names, legend = short_names(names_of(roots))
    runs = [_read(root, name) for root, name in zip(roots, names, strict=True)]
    first = runs[0]
    for run in runs[1:]:
        if [row["prompt"] for row in run.replies] != [row["prompt"] for row in first.replies]:
            raise ConfigError(
                f"{run.root}: has other held-out prompts than {first.root}. Evaluate both with the same data.test"
            )
        if run.seed != first.seed:
            raise ConfigError(
                f"{run.root}: was evaluated with --seed {run.seed}, and {first.root} with --seed {first.seed}, so they "
                "have different random numbers. Evaluate both with the same --seed"
            )
    display = Display("compare", quiet=False)
    display.notes(*legend)
    keys = [key for key in SHOWN if all(key in row["ppo"] for run in runs for row in run.replies)]
    if len({meaning_of(run.manifests.get("ppo"), "score") for run in runs}) > 1:
        keys.remove("score")
        display.note("the runs have other rewards, so their scores are not compared")
    own = {key: rate_figure if key in JUDGED else mean_figure for key in keys}
    lines = [[run.name, *(str(own[key](run.numbers(key), seed=SEED)) for key in keys)] for run in runs]
    display.table(f"PPO, {len(first.replies)} held-out prompts", ["", *keys], lines)
    lines = [[run.name, *(str(difference(first, run, key)) for key in keys)] for run in runs[1:]]
    display.table(f"Difference from {first.name}, on the same prompts", ["", *keys], lines)
    for key in JUDGED:
        if key in keys:
            show_wins(runs, key, display)
    show_judged(runs, display)
    if rows := config_differences([run.manifests for run in runs]):
        display.table("Keys that differ", ["", *(run.name for run in runs)], rows)
    else:
        display.note("the configs are equal")


def _read(root: Path, name: str) -> Compared:
    finished_stages(root, "ppo")  # raises ArtifactError if it is not one
    found = evaluation_of(root, "ppo", stage_directory(root, "ppo"))
    if not isinstance(found.get("replies"), list):
        path = root / "eval" / "ppo" / "evaluation.json"
        raise ArtifactError(f"{path}: cannot be read, or is older than the stage. Run: rlhf eval {root}")
    manifests = {stage: m for stage in STAGES if (m := read_manifest(stage_directory(root, stage))) is not None}
    return Compared(name, root, found["replies"], manifests, found.get("seed"))


def difference(first: Compared, other: Compared, key: str) -> Figure:
    """The mean over prompts of the other run's number minus the first run's, with its interval."""
    if key in JUDGED:
        return difference_figure(other.numbers(key), first.numbers(key), seed=SEED)
    return mean_figure(other.numbers(key) - first.numbers(key), seed=SEED)


def strength_figures(won: Tensor, strengths: Callable[[Tensor], Tensor]) -> list[Figure]:
    """The strengths of k players from [prompts, k, k] wins. For their intervals the prompts are resampled.

    `strengths` maps [..., k, k] numbers of wins to [..., k].
    """

    def of_player(player: int) -> Figure:
        def resampled(rows: Tensor) -> Tensor:
            return torch.stack([strengths(won[part].sum(1))[:, player] for part in rows.split(50)]).flatten()

        interval = bootstrap_interval(resampled, torch.arange(len(won)), seed=SEED, num_resamples=STRENGTH_RESAMPLES)
        return Figure(found[player], *interval, len(won))

    found = strengths(won.sum(0)).tolist()
    return [of_player(player) for player in range(len(found))]


def show_wins(runs: Sequence[Compared], key: str, display: Display) -> None:
    """Show the share of prompts on which the row's run beats the column's, and the strength of each run."""
    numbers = torch.stack([run.numbers(key) for run in runs], dim=1)  # [prompts, runs]
    won = wins(numbers[:, :, None], numbers[:, None, :])  # [prompts, runs, runs]
    columns = range(len(runs) if len(runs) <= MOST_COLUMNS else 1)
    lines = [
        [run.name, *("" if i == j else str(share_figure(won[:, i, j])) for j in columns), str(strength)]
        for i, (run, strength) in enumerate(zip(runs, strength_figures(won, bradley_terry), strict=True))
    ]
    heads = ["", *(f"beats {runs[j].name}" for j in columns), "strength"]
    display.table(f"By {key}: share of prompts, ties 1/2; Bradley-Terry strength in nats", heads, lines)


def show_judged(runs: Sequence[Compared], display: Display) -> None:
    """Show how often each run beats SFT by the judge of `rlhf eval --judge`, and the strengths of SFT and the runs.

    Only prompts that were judged in every run count. Without any, or if SFT replied otherwise, nothing is shown.
    """
    first = runs[0].replies
    if any([row["sft"]["reply"] for row in run.replies] != [row["sft"]["reply"] for row in first] for run in runs):
        return
    kept = [i for i in range(len(first)) if all("judge" in run.replies[i] for run in runs)]
    if not kept:
        return
    points = torch.tensor([[float(run.replies[i]["judge"]) for i in kept] for run in runs], dtype=torch.float64)
    won = torch.zeros(len(kept), len(runs) + 1, len(runs) + 1, dtype=torch.float64)
    won[:, 1:, 0], won[:, 0, 1:] = points.T, 1 - points.T
    # No prior between the runs: they were not compared with each other.
    prior = torch.zeros(len(runs) + 1, len(runs) + 1, dtype=torch.float64)
    prior[1:, 0] = prior[0, 1:] = JUDGE_PRIOR
    sft, *others = strength_figures(won, lambda total: bradley_terry(total + prior, prior=0.0))
    lines = [["SFT", "", str(sft)]]
    lines += [[run.name, str(share_figure(p)), str(s)] for run, p, s in zip(runs, points, others, strict=True)]
    display.table("By the judge: share of prompts, ties 1/2; strength in nats", ["", "beats SFT", "strength"], lines)
