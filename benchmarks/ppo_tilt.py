"""Compare PPO's score with what its KL allows: the exponential tilt and best-of-n of samples of the SFT model.

    python benchmarks/ppo_tilt.py --work DIR --seeds 0 1 2 3 4 5

For each seed `rlhf pipeline configs/support` trains SFT, RM and PPO on one thread, to DIR/seed<N>. Then the SFT model
writes 64 replies to each of 128 held-out prompts and the policy 8, all scored by the same reward model. The yardstick
is the tilt with one beta for all prompts whose KL is the policy's own (rlhf_cli/algorithms/tilt.py).

Finished stages and samples are kept. The report is DIR/PPO_TILT.md, or with --record the tracked file beside this
script.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ppo_quality import HERE, ROOT, Measurement, measure, table, train_ours
from torch import Tensor

from rlhf_cli.algorithms.best_of_n import best_of_n, best_of_n_kl_bound
from rlhf_cli.algorithms.tilt import exponential_tilt, tilt_beta
from rlhf_cli.processes.environment import set_up_process

NUM_PROMPTS = 128
SFT_SAMPLES = 64
"""Per prompt, without --samples. The tilt's KL can be at most log(64) = 4.16 nats."""
POLICY_SAMPLES = 8
BEST_OF = (8, 16, 32)
GOAL = 0.95
"""The share of the tilt's score that PPO is to reach."""


@dataclass(frozen=True)
class Seed:
    """One seed: the policy's replies and the SFT model's."""

    seed: int
    policy: Measurement
    scores: Tensor
    """[prompts, samples] scores of the SFT model's replies."""
    gold: Tensor
    """[prompts, samples] the judge's figure of the same replies."""

    @property
    def beta(self) -> float:
        """The beta at which the tilt has the policy's KL."""
        return tilt_beta(self.scores, self.policy.mean("kl"))

    @property
    def tilt_score(self) -> float:
        """The tilt's expected score at the policy's KL."""
        return self._tilted(self.scores)

    @property
    def tilt_gold(self) -> float:
        """The tilt's expected gold at the policy's KL."""
        return self._tilted(self.gold)

    @property
    def share(self) -> float:
        """The policy's score over the tilt's."""
        return self.policy.mean("score") / self.tilt_score

    @property
    def share_error(self) -> float:
        """Standard error of `share` from the spread over prompts, paired, with the tilt's beta held."""
        tilted = (exponential_tilt(self.scores, beta=self.beta)[0] * self.scores).sum(1).tolist()
        gaps = [p - self.share * t for p, t in zip(self.policy.by_prompt("score"), tilted, strict=True)]
        return statistics.stdev(gaps) / len(gaps) ** 0.5 / self.tilt_score

    def _tilted(self, figures: Tensor) -> float:
        weights, _ = exponential_tilt(self.scores, beta=self.beta)
        return (weights * figures).sum(1).mean().item()


def sft_samples(run: Path, samples: int) -> tuple[Tensor, Tensor]:
    """(scores, gold) of the SFT model's replies, [NUM_PROMPTS, samples] each; kept in sft_samples_<samples>.json."""
    kept = run / f"sft_samples_{samples}.json"
    if not kept.is_file():
        measured = measure(run / "sft" / "model", run, samples, NUM_PROMPTS)
        kept.write_text(json.dumps({name: measured.figures[name] for name in ("score", "gold")}), encoding="utf-8")
    figures = json.loads(kept.read_text(encoding="utf-8"))
    return torch.tensor(figures["score"]).T, torch.tensor(figures["gold"]).T


def report(seeds: Sequence[Seed], command: str) -> str:
    """The text of PPO_TILT.md."""
    rows, best = [], []
    for s in seeds:
        rows.append(
            [
                str(s.seed),
                *(f"{s.policy.mean(name):.2f}" for name in ("kl", "score")),
                f"{s.tilt_score:.2f}",
                f"{100 * s.share:.1f} ± {100 * s.share_error:.1f} %",
                f"{s.beta:.2f}",
                *(f"{x:.2f}" for x in (s.policy.mean("gold"), s.tilt_gold)),
                *(f"{s.policy.mean(name):.2f}" for name in ("right", "unique")),
            ]
        )
        best.append([str(s.seed), *(f"{best_of_n(s.scores, n)[0].mean().item():.2f}" for n in BEST_OF)])
    shares, samples = [s.share for s in seeds], seeds[0].scores.shape[1]
    reached = sum(share >= GOAL for share in shares)
    return "\n".join(
        [
            "# PPO's score against the best that its KL allows",
            "",
            "Written by `ppo_tilt.py`, whose docstring says what is measured:",
            "",
            f"    {command}",
            "",
            f"PPO is to reach {100 * GOAL:.0f} % of the tilt's score at its own KL. {reached} of {len(seeds)} seeds "
            f"do. The mean is {100 * statistics.fmean(shares):.1f} %, the lowest {100 * min(shares):.1f} %.",
            "",
            *table(["seed", "KL", "score", "tilt's", "share", "beta", "gold", "tilt's", "right", "unique"], rows),
            "",
            f"{NUM_PROMPTS} held-out prompts, {POLICY_SAMPLES} replies each at temperature 1. Tilt: of {samples} "
            "replies of the SFT model per prompt, at the KL of the policy. After the ±: the standard error over "
            "prompts.",
            "",
            f"The tilt is an estimate that is too low: {samples} samples express at most "
            f"{torch.tensor(float(samples)).log().item():.2f} nats, and near that only a few of them carry the "
            "weight. Best-of-n has no such bias in its score, and its KL is at most log(n) - (n - 1) / n:",
            "",
            *table(["seed", *(f"best of {n}, KL at most {best_of_n_kl_bound(n):.2f}" for n in BEST_OF)], best),
            "",
        ]
    )


def main() -> None:
    """Train, measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--samples", type=int, default=SFT_SAMPLES, help="replies of the SFT model to a prompt")
    parser.add_argument("--record", action="store_true", help="write the tracked benchmarks/PPO_TILT.md")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    # The configs name their data relative to the root of the repository.
    os.chdir(ROOT)
    torch.set_num_threads(1)
    seeds = []
    for seed in arguments.seeds:
        run = work / f"seed{seed}"
        train_ours(run, seed)
        policy = measure(run / "ppo" / "model", run, POLICY_SAMPLES, NUM_PROMPTS)
        seeds.append(Seed(seed, policy, *sft_samples(run, arguments.samples)))
    text = report(seeds, f"python benchmarks/ppo_tilt.py --work DIR --seeds {' '.join(map(str, arguments.seeds))}")
    ((HERE if arguments.record else work) / "PPO_TILT.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    set_up_process()
    main()
