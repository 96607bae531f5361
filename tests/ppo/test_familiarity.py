"""How far PPO's replies are from the SFT model's: the formulas, and the figure and the warning of real runs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from rlhf_cli.algorithms.mahalanobis import shrunk_gaussian, squared_shift, whitened
from rlhf_cli.ppo import held_out
from rlhf_cli.ppo.held_out import LEAST, Home, home_of
from support.setup import ALONE
from support.tiny import read_jsonl


def samples(n, size, seed=0, shift=0.0):
    """Vectors whose coordinates have standard deviations 1 to 3 and correlate."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.linspace(1, 3, size)
    x = torch.randn(n, size, generator=random) * scales
    return x + 0.5 * x.roll(1, dims=1) + shift * scales


@pytest.mark.parametrize(("n", "size"), [(50, 4), (5, 12), (2, 3)])
def test_distances_are_those_by_the_inverse_of_the_shrunk_covariance(n, size):
    """Chen et al., eq. 23, written out; also of fewer samples than numbers, whose own covariance has no inverse."""
    x, others = samples(n, size).double(), samples(7, size, seed=1).double()
    centred = x - x.mean(0)
    covariance = centred.T @ centred / n
    trace, squares = covariance.trace(), (covariance @ covariance).trace()
    above, below = (1 - 2 / size) * squares + trace**2, (n + 1 - 2 / size) * (squares - trace**2 / size)
    rho = min(1.0, (above / below).item())
    shrunk = (1 - rho) * covariance + rho * trace / size * torch.eye(size).double()
    away = others - x.mean(0)
    expected = (away @ shrunk.inverse() * away).sum(1).sqrt()
    torch.testing.assert_close(whitened(others, shrunk_gaussian(x)).norm(dim=1), expected)


def test_the_shift_is_the_mean_over_pairs_and_has_no_bias():
    z = samples(6, 3).double()
    pairs = [torch.dot(z[i], z[j]).item() for i, j in itertools.permutations(range(6), 2)]
    shift = squared_shift(z.sum(0), z.square().sum().item(), 6)
    assert shift == pytest.approx(sum(pairs) / len(pairs))
    random = torch.Generator().manual_seed(0)
    batches = torch.randn(4000, 4, 3, generator=random, dtype=torch.float64) + torch.tensor([2.0, 0.0, 0.0])
    found = [squared_shift(z.sum(0), z.square().sum().item(), 4) for z in batches]
    assert sum(found) / len(found) == pytest.approx(4.0, abs=0.1), "of four vectors, as of infinitely many"


def test_a_batch_from_home_is_near_it_and_a_shifted_one_far():
    home = home_of(samples(400, 16))
    near, far = (home.unfamiliarity(samples(64, 16, 1, shift), ALONE) for shift in (0.0, 3.0))
    assert near["response/unfamiliarity"] < 0.3
    assert far["response/unfamiliarity"] > 1
    failed = torch.cat([samples(64, 16, 1), torch.full((3, 16), torch.nan)])
    assert home.unfamiliarity(failed, ALONE) == near, "scores that failed have no features"
    assert home.unfamiliarity(failed[-3:], ALONE) == home.unfamiliarity(None, ALONE) == {}
    assert home_of(samples(LEAST - 1, 16)) is None
    assert home_of(torch.ones(LEAST, 16)) is None


def test_a_run_measures_the_hidden_states_that_its_scores_are_read_from(watch, pipeline, data, monkeypatch):
    """Of the SFT model's replies to 24 prompts, before training, and of each rollout."""
    root, seen = pipeline("llama"), []
    unfamiliarity = Home.unfamiliarity

    def recorded(self, features, world):
        seen.append((self, features))
        return unfamiliarity(self, features, world)

    monkeypatch.setattr(Home, "unfamiliarity", recorded)
    monkeypatch.setattr(held_out, "home_of", lambda features: seen.append((None, features)) or home_of(features))
    run = watch(
        data={"test": str(data["prompts"])},
        policy={"path": str(root / "sft")},
        rewards=[{"type": "reward_model", "path": str(root / "rm")}],
    )
    source = run.setup.rewards[0]
    (_, of_sft), *of_rollouts = seen
    scores = [((x @ source.model.score.weight.T - source.mean) / source.std).mean().item() for _, x in seen]
    assert [len(x) for _, x in seen] == [24, 8, 8]
    figures = read_jsonl(run.stage_dir / "metrics.jsonl")
    before = json.loads((run.stage_dir / "evaluation.json").read_text())["sft"]["score_mean"]
    assert scores == pytest.approx([before, *(row["objective/score"] for row in figures)], abs=1e-5)
    home = home_of(of_sft)
    expected = [unfamiliarity(home, x, ALONE)["response/unfamiliarity"] for _, x in of_rollouts]
    assert [row["response/unfamiliarity"] for row in figures] == expected


def test_a_run_without_a_reward_model_or_with_few_held_out_prompts_has_no_figure(watch):
    assert all("response/unfamiliarity" not in row for row in watch().metrics)
