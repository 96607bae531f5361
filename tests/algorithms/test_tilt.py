"""The exponential tilt: against an exact optimum, a normal distribution, and at its two ends."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_cli.algorithms.tilt import exponential_tilt, tilt_beta

# ref_policy gives the three responses to each prompt these probabilities: four samples show them exactly.
PROBABILITIES = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
SCORES = torch.tensor([[0.0, 1.0, 3.0], [2.0, -1.0, -1.5]], dtype=torch.float64)
SAMPLES = SCORES[:, [0, 0, 1, 2]]


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_tilt_of_exact_frequencies_is_the_optimum_of_the_objective(beta: float) -> None:
    weights, kl = exponential_tilt(SAMPLES, beta=beta)
    unnormalised = PROBABILITIES * (SCORES / beta).exp()
    optimum = unnormalised / unnormalised.sum(1, keepdim=True)
    torch.testing.assert_close(torch.stack([weights[:, :2].sum(1), weights[:, 2], weights[:, 3]], 1), optimum)
    torch.testing.assert_close(kl, (optimum * (optimum / PROBABILITIES).log()).sum(1))
    objective = (weights * SAMPLES).sum(1) - beta * kl
    torch.testing.assert_close(objective, beta * unnormalised.sum(1).log(), msg="at pi* J is beta * log Z")


def test_the_tilt_of_normal_scores() -> None:
    """A standard normal tilted at beta has mean 1 / beta and KL 1 / (2 * beta**2)."""
    scores = torch.distributions.Normal(0, 1).icdf((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)[None]
    weights, kl = exponential_tilt(scores, beta=2.0)
    assert (weights * scores).sum().item() == pytest.approx(0.5, rel=1e-3)
    assert kl.item() == pytest.approx(0.125, rel=1e-3)


def test_the_two_ends_of_the_tilt() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 5.0, 1.0]])
    weights, kl = exponential_tilt(scores, beta=1e-6)  # only the best samples are left: one, and two
    torch.testing.assert_close((weights * scores).sum(1), torch.tensor([4.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(kl, torch.tensor([4.0, 2.0], dtype=torch.float64).log())
    weights, kl = exponential_tilt(scores, beta=1e9)
    torch.testing.assert_close((weights * scores).sum(1), scores.double().mean(1))
    assert kl.abs().max() < 1e-12


def test_beta_is_one_number_for_the_mean_kl_of_all_prompts() -> None:
    kl = exponential_tilt(SAMPLES, beta=0.7)[1].mean().item()
    assert tilt_beta(SAMPLES, kl) == pytest.approx(0.7, rel=1e-9)
    assert tilt_beta(10 * SAMPLES.float() + 3, kl) == pytest.approx(7.0, rel=1e-5), "in units of the score"


@pytest.mark.parametrize("kl", [0.0, -0.1, math.nan, math.log(4), 1.05])
def test_a_kl_that_the_samples_cannot_express_is_refused(kl: float) -> None:
    """The second prompt's two best samples are equal, so the mean KL stays below (log(4) + log(2)) / 2 = 1.04."""
    with pytest.raises(ValueError, match=r"must be above 0 and below 1\.040, .* 4 samples"):
        tilt_beta(SAMPLES, kl)


def test_scores_that_are_all_equal_express_no_kl() -> None:
    assert exponential_tilt(torch.ones(1, 3), beta=0.1)[1].abs().item() < 1e-12
    with pytest.raises(ValueError, match=r"below 0\.000"):
        tilt_beta(torch.ones(1, 3), 0.1)
