"""Claims about PPO's formulas, checked with loops, by hand, and with sums over all possible responses."""

import itertools
import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from rlhf_cli.algorithms.advantages import gae, group_advantages, reward_to_go, token_rewards
from rlhf_cli.algorithms.kl import adaptive_kl_coef, kl_estimate, kl_full, kl_loss, sequence_k2_loss
from rlhf_cli.algorithms.losses import loss_weights, penalty_loss, policy_loss, truncated_importance
from rlhf_cli.algorithms.score_transforms import Moments, merge, moments_of, overlong_penalty
from rlhf_cli.tensor_ops import length_mask
from support.formulas import GARBAGE, LENGTHS, close, draw, gae_by_sums, gradient_of, padded_with, response_batch

# ---- all possible responses: token 0 is EOS, and a response ends with it or after MAX_NEW_TOKENS


V, MAX_NEW_TOKENS = 3, 3


def all_responses():
    """Every response, the state (prefix) before each of its tokens, and the mask of its real tokens."""
    prefixes = [p for n in range(MAX_NEW_TOKENS) for p in itertools.product(range(1, V), repeat=n)]
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    responses = [(*p, 0) for p in prefixes] + list(itertools.product(range(1, V), repeat=MAX_NEW_TOKENS))
    width = MAX_NEW_TOKENS
    ids = torch.tensor([list(y) + [0] * (width - len(y)) for y in responses])
    states = torch.tensor([[number.get(y[:t], 0) if t < len(y) else 0 for t in range(width)] for y in responses])
    return ids, states, length_mask([len(y) for y in responses], width=width)


IDS, STATES, MASK = all_responses()
NUM_STATES = int(STATES.max()) + 1


def logprobs_of(logits):
    """[Y, R] log-probabilities of all responses under a policy with one row of logits per state; NaN under padding."""
    return torch.where(MASK, logits.log_softmax(-1)[STATES, IDS], torch.nan)


def probabilities(logits):
    return torch.where(MASK, logprobs_of(logits), 0).sum(-1).exp()


def expected_weights(logits):
    """Weights that make a sum over all responses the expectation over responses of the policy."""
    return probabilities(logits).detach().unsqueeze(-1).expand(MASK.shape)


@pytest.fixture
def logits():
    return draw(NUM_STATES, V, seed=11)


@pytest.fixture
def ref_logits():
    return draw(NUM_STATES, V, seed=12)


def test_the_enumerated_responses_have_probability_1_in_total(logits):
    assert len({tuple(row.tolist()) for row in IDS}) == len(IDS) == 1 + 2 + 4 + 8
    close(probabilities(logits).sum(), 1.0)


def expected_visits(logits):
    """[S] the expected number of visits to each state in one response of the policy."""
    weights = expected_weights(logits)
    return torch.zeros(NUM_STATES, dtype=torch.float64).index_put((STATES[MASK],), weights[MASK], accumulate=True)


def kl_of_states(p_logits, q_logits):
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def sequence_kl(logits, ref_logits):
    log_ratio = torch.where(MASK, logprobs_of(logits) - logprobs_of(ref_logits), 0).sum(-1)
    return (probabilities(logits) * log_ratio).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expected_sum_of_k1_and_k3_is_the_kl_of_whole_responses(logits, ref_logits, estimator):
    kl = kl_estimate(logprobs_of(logits), logprobs_of(ref_logits), estimator=estimator)
    mean_kl = kl_loss(kl, MASK, weights=expected_weights(logits))[0]
    close(mean_kl, sequence_kl(logits, ref_logits))
    close(mean_kl, (expected_visits(logits) * kl_of_states(logits, ref_logits)).sum())


def expected_kl_gradient(logits, ref_logits, estimator):
    """The expected gradient of the KL loss with respect to the logits, over responses of the policy."""

    def loss(logits):
        if estimator == "full":
            kl = kl_full(logits, ref_logits)[STATES]
        else:
            kl = kl_estimate(logprobs_of(logits), logprobs_of(ref_logits), estimator=estimator)
        return kl_loss(kl, MASK, weights=expected_weights(logits))[0]

    return gradient_of(loss, logits)


def test_the_expected_gradient_of_k1_is_0(logits, ref_logits):
    close(expected_kl_gradient(logits, ref_logits, "k1"), torch.zeros(NUM_STATES, V))


@pytest.mark.parametrize("estimator", ["k2", "full"])
def test_the_gradient_of_k2_and_full_is_that_of_the_kl_with_fixed_states(logits, ref_logits, estimator):
    visits = expected_visits(logits)
    expected = gradient_of(lambda logits: (visits * kl_of_states(logits, ref_logits)).sum(), logits)
    close(expected_kl_gradient(logits, ref_logits, estimator), expected)
    assert (expected - gradient_of(lambda logits: sequence_kl(logits, ref_logits), logits)).abs().max() > 0.1


def test_the_gradient_of_k3_is_that_of_the_kl_from_ref_to_policy(logits, ref_logits):
    visits = expected_visits(logits)
    expected = gradient_of(lambda logits: (visits * kl_of_states(ref_logits, logits)).sum(), logits)
    close(expected_kl_gradient(logits, ref_logits, "k3"), expected)
    assert (expected - expected_kl_gradient(logits, ref_logits, "k2")).abs().max() > 0.05


def test_the_gradient_of_the_sequence_k2_is_that_of_the_kl_of_whole_responses(logits, ref_logits):
    def loss(logits):
        return sequence_k2_loss(logprobs_of(logits), logprobs_of(ref_logits), MASK, weights=expected_weights(logits))[0]

    close(gradient_of(loss, logits), gradient_of(lambda logits: sequence_kl(logits, ref_logits), logits))


def test_the_kl_penalty_and_its_gradient_are_unbiased_on_samples_of_the_old_policy(logits):
    old = logits + draw(NUM_STATES, V, seed=14)
    weights, no_advantages = expected_weights(old), torch.zeros(MASK.shape, dtype=torch.float64)

    def expected_kl(logits):
        return penalty_loss(
            logprobs_of(logits), logprobs_of(old), no_advantages, MASK, policy_kl_coef=1.0, weights=weights
        )[0]

    def kl(logits):
        return (expected_visits(old) * kl_of_states(old, logits)).sum()

    assert kl(logits) > 0.1
    close(expected_kl(logits), kl(logits))
    close(gradient_of(expected_kl, logits), gradient_of(kl, logits))

    def k3_the_wrong_way_round(logits):
        return kl_loss(kl_estimate(logprobs_of(logits), logprobs_of(old), estimator="k3"), MASK, weights=weights)[0]

    assert abs(k3_the_wrong_way_round(logits) - kl(logits)) > 0.03
    assert (gradient_of(k3_the_wrong_way_round, logits) - gradient_of(kl, logits)).abs().max() > 0.03


# ---- importance weights of older samples


def test_without_a_cap_the_decoupled_objective_is_that_of_the_new_policy():
    behavior, logprobs, new = (draw(5, seed=seed).log_softmax(-1) for seed in (1, 2, 3))
    advantages, mask = draw(5, seed=4), torch.ones(5, dtype=torch.bool)
    corrected = advantages * truncated_importance(logprobs, behavior, mask, cap=math.inf)
    loss, _ = policy_loss(new, logprobs, corrected, mask, clip_range=100.0, weights=behavior.exp())
    close(loss, -(new.exp() * advantages).sum())


# ---- weights of tokens


def aggregate_by_loops(x, mask, aggregation, max_new_tokens):
    rows = [[float(x[b, t]) for t in range(mask.shape[1]) if mask[b, t]] for b in range(len(mask))]
    if aggregation == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "sequence":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(sum(row) for row in rows) / len(rows) / max_new_tokens


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_weighted_losses_of_microbatches_add_up_to_the_aggregate(aggregation, sizes):
    batch, mask = response_batch(["x"])
    expected = aggregate_by_loops(batch["x"], mask, aggregation, max_new_tokens=9)
    wide, wide_mask = padded_with(batch, mask, math.nan)
    total = 0.0
    for x, part_mask in zip(wide["x"].split(sizes), wide_mask.split(sizes), strict=True):
        weights = loss_weights(
            part_mask,
            aggregation=aggregation,
            num_tokens=torch.tensor(sum(LENGTHS)),
            num_sequences=torch.tensor(len(LENGTHS)),
            max_new_tokens=9,
            dtype=torch.float64,
        )
        assert weights.shape == part_mask.shape
        assert (weights[~part_mask] == 0).all()
        total += kl_loss(x, part_mask, weights=weights)[0]
    close(total, expected)


def test_weights_are_float32_and_a_row_without_real_tokens_has_none():
    weights = loss_weights(length_mask([2, 0]), aggregation="sequence", num_tokens=2, num_sequences=2, max_new_tokens=3)
    assert weights.dtype == torch.float32
    assert weights.tolist() == [[0.25, 0.25], [0, 0]]


# ---- the exact KL


def test_kl_full_of_tokens_that_cannot_be_sampled():
    inf = math.inf
    p, q = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    expected = float((p * (p / q).log()).sum())
    impossible = torch.tensor([-inf], dtype=torch.float64)
    logits, ref_logits = torch.cat([p.log(), impossible]), torch.cat([q.log(), impossible])
    close(kl_full(logits, ref_logits), expected)
    gradient = gradient_of(lambda x: kl_full(x, ref_logits), logits)
    close(gradient[:2], gradient_of(lambda x: kl_full(x, q.log()), p.log()))
    assert gradient[2] == 0
    # Impossible for the policy only: its term is 0, and the reference keeps its probability.
    only_ref = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64)
    close(kl_full(logits, only_ref.log()), float((p * (p / only_ref[:2]).log()).sum()))
    assert gradient_of(lambda x: kl_full(x, only_ref.log()), logits).isfinite().all()
    # Impossible for the reference only: inf, even if the policy's probability is 0 in floating point. No row is NaN.
    both = torch.stack([only_ref.log(), logits, torch.tensor([0.0, 0.0, -1e4], dtype=torch.float64)])
    assert kl_full(both, ref_logits.expand(3, 3)).isinf().tolist() == [True, False, True]
    assert not gradient_of(lambda x: kl_full(x, ref_logits.expand(3, 3))[1], both).isnan().any()


# ---- rewards, returns and advantages


@pytest.mark.parametrize("garbage", GARBAGE)
def test_dense_rewards_are_added_at_real_tokens_only(garbage):
    batch, mask = response_batch(["kl", "dense"])
    score = draw(4, seed=5)
    wide, wide_mask = padded_with(batch, mask, garbage)
    dense = wide["dense"].requires_grad_()
    actual = token_rewards(score, wide["kl"], wide_mask, kl_coef=0.1, dense=dense)
    assert not actual.requires_grad
    close(actual[:, :5], token_rewards(score, batch["kl"], mask, kl_coef=0.1) + batch["dense"].where(mask, 0))
    assert (actual[~wide_mask] == 0).all()


@pytest.mark.parametrize("garbage", [0.0, *GARBAGE])
def test_gae(garbage):
    """value_lambda is the lambda of the returns only."""
    batch, mask = response_batch(["rewards", "values"])
    wide, wide_mask = padded_with(batch, mask, garbage)
    inputs = wide["rewards"], wide["values"], wide_mask
    advantages, returns = gae(*inputs, gamma=0.9, gae_lambda=0.7, value_lambda=0.4)
    close(advantages[:, :5], gae_by_sums(batch["rewards"], batch["values"], mask, 0.9, 0.7))
    expected = gae_by_sums(batch["rewards"], batch["values"], mask, 0.9, 0.4) + batch["values"].where(mask, 0)
    close(returns[:, :5], expected)
    assert (returns[~wide_mask] == 0).all()
    zero = gae(*inputs, gamma=0.9, gae_lambda=0.7, value_lambda=0.0)[1]
    assert not torch.equal(zero, gae(*inputs, gamma=0.9, gae_lambda=0.7)[1])  # 0 does not mean None
    monte_carlo = gae(*inputs, gamma=0.9, gae_lambda=0.7, value_lambda=1.0)[1]
    close(monte_carlo, reward_to_go(wide["rewards"], wide_mask, gamma=0.9))


BASELINES = ["rloo", "grpo", "dr_grpo"]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("value", [0.1, -7.3, 1e6, 0.0])
@pytest.mark.parametrize("n", [3, 7])
def test_a_group_of_equal_totals_has_advantage_0(baseline, value, n):
    for dtype in (torch.float32, torch.float64):
        totals = torch.cat([torch.full((n,), value, dtype=dtype), torch.arange(n, dtype=dtype)])
        actual = group_advantages(totals, samples_per_prompt=n, baseline=baseline)
        assert actual[:n].tolist() == [0.0] * n
        assert actual[n:].any()
        assert actual.dtype == dtype


def test_invalid_groups_are_refused():
    with pytest.raises(ValueError, match="samples_per_prompt is 1"):
        group_advantages(torch.zeros(4), samples_per_prompt=1, baseline="rloo")
    with pytest.raises(ValueError, match="4 responses cannot be split into groups of 3"):
        group_advantages(torch.zeros(4), samples_per_prompt=3, baseline="rloo")
    with pytest.raises(AssertionError, match="got: 'best'"):
        group_advantages(torch.zeros(4), samples_per_prompt=2, baseline="best")


def test_overlong_penalty():
    lengths = torch.tensor([1, 6, 7, 9, 10, 14])
    penalties = overlong_penalty(lengths, max_new_tokens=10, buffer=4, penalty=0.5)
    assert penalties.tolist() == [0.0, 0.0, 0.125, 0.375, 0.5, 0.5]
    with pytest.raises(ValueError, match="buffer is 0"):
        overlong_penalty(lengths, max_new_tokens=10, buffer=0, penalty=1.0)


# ---- controllers


def test_adaptive_kl_coef_stays_above_0_and_nan_stays_nan():
    assert adaptive_kl_coef(0.2, 0.0, target=6.0, horizon=100, num_episodes=1000) == 0.0
    assert math.isnan(adaptive_kl_coef(0.2, math.nan, target=6.0, horizon=100, num_episodes=10))


# ---- moments


def test_moments_of_too_few_numbers():
    assert moments_of(torch.zeros(0)) == Moments() == Moments(0, 0, 0)
    assert Moments().std == 1.0
    one = moments_of(torch.tensor([5.0]))
    assert (one.count, one.mean, one.squared_deviations, one.std) == (1, 5.0, 0.0, 1.0)
    assert moments_of(torch.tensor([5.0, 5.0])).std == 0.0
    assert merge(Moments(), Moments(0, math.nan, math.nan)) == Moments()  # the mean of an empty batch has no influence
    with pytest.raises(FrozenInstanceError):
        one.mean = 3.0


def test_moments_of_float32_are_computed_in_float64():
    x = 1e4 + draw(1000, seed=1).float()
    actual = moments_of(x)
    close(actual.mean, math.fsum(x.tolist()) / 1000, 1e-14)
    close(actual.squared_deviations, math.fsum((value - actual.mean) ** 2 for value in x.tolist()))
