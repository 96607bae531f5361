"""Formulas, compared with slow, obvious loops over Python floats, and their properties."""

import itertools
import math

import pytest
import torch

from rlhf_cli.algorithms.advantages import gae, masked_whiten, token_rewards
from rlhf_cli.algorithms.kl import kl_estimate, kl_full, kl_loss, sequence_k2_loss
from rlhf_cli.algorithms.losses import entropy_bonus, explained_variance, lm_loss, penalty_loss, policy_loss, value_loss
from rlhf_cli.algorithms.reward_model import pairwise_loss, plackett_luce_loss, unbiased_weight
from rlhf_cli.algorithms.statistics import distinct_n, pair_accuracy, pearson, spearman, wilson_interval
from rlhf_cli.algorithms.tilt import exponential_tilt, tilt_beta
from rlhf_cli.tensor_ops import length_mask, pad_rows, token_entropy, token_logprobs
from support.formulas import (
    GARBAGE,
    LENGTHS,
    close,
    draw,
    finite_differences,
    gradient_of,
    padded_with,
    response_batch,
)
from support.worlds import in_each_process

CLIP_RANGE = 0.2


# ---- masks


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten(shift_mean, garbage):
    batch, mask = response_batch(["x"])
    tokens = 3 * batch["x"][mask] + 7
    expected = (tokens - tokens.mean()) / (tokens.var() + 0.01).sqrt() + (0 if shift_mean else tokens.mean())
    wide, wide_mask = padded_with({"x": 3 * batch["x"] + 7}, mask, garbage)
    whitened = masked_whiten(wide["x"], wide_mask, shift_mean=shift_mean, eps=0.01)
    close(whitened[wide_mask], expected)
    assert (whitened[~wide_mask] == 0).all()


@pytest.mark.parametrize("bessel", [True, False])
@pytest.mark.parametrize("token", [3.0, -1e4])
def test_whitening_a_single_real_token_gives_zero_and_not_nan(token, bessel):
    x, mask = torch.tensor([[token, math.nan]]), length_mask([1], width=2)
    assert masked_whiten(x, mask, bessel=bessel).tolist() == [[0, 0]]
    assert masked_whiten(x, mask, bessel=bessel, shift_mean=False).tolist() == [[token, 0]]
    assert masked_whiten(x, ~(mask | True), bessel=bessel).tolist() == [[0, 0]]  # no real token


def test_whitening_is_accurate_at_a_large_mean():
    x = 1e4 + torch.tensor([[-0.5, 0.5, -0.5, 0.5]])  # float32: E[x^2] - E[x]^2 would be 0 or 8
    close(masked_whiten(x, length_mask([4]), bessel=False), [[-1, 1, -1, 1]], 1e-6)


@pytest.mark.parametrize("bessel", [True, False])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_over_processes_is_whitening_of_the_whole_batch(shift_mean, bessel):
    batch, mask = response_batch(["x"])
    options = {"shift_mean": shift_mean, "bessel": bessel}
    rows = (slice(0, 1), slice(1, 4), slice(4, 4))

    def own(world):
        part = rows[world.rank]
        return masked_whiten(batch["x"][part], mask[part], **options, reduce=world.sum)

    close(torch.cat(in_each_process(3, own)), masked_whiten(batch["x"], mask, **options))


# ---- log-probabilities


def test_logprobs_entropy_and_kl_survive_extreme_logits():
    logits = torch.tensor([1000.0, 0.0, -1000.0])
    assert token_logprobs(logits.expand(3, 3), torch.arange(3)).tolist() == [0.0, -1000.0, -2000.0]
    assert token_entropy(logits) == 0
    assert kl_full(torch.tensor([1000.0, 0.0]), torch.tensor([0.0, 1000.0])) == 1000.0
    filtered = torch.tensor([math.log(2), 0.0, -math.inf], dtype=torch.float64)
    close(token_logprobs(filtered, torch.tensor(0)), math.log(2 / 3))
    close(token_entropy(filtered), math.log(3) - 2 / 3 * math.log(2))
    assert gradient_of(token_entropy, filtered).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logprobs_entropy_and_kl_are_computed_in_float32_at_least(dtype):
    logits, others = (4 * draw(3, 6, seed=2)).to(dtype), (4 * draw(3, 6, seed=3)).to(dtype)
    ids = torch.tensor([0, 5, 2])
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    for actual, expected in [
        (token_logprobs(logits, ids, temperature=0.9), token_logprobs(logits.double(), ids, temperature=0.9)),
        (token_entropy(logits, temperature=0.9), token_entropy(logits.double(), temperature=0.9)),
        (kl_full(logits, others, temperature=0.9), kl_full(logits.double(), others.double(), temperature=0.9)),
    ]:
        assert actual.dtype == precise
        close(actual, expected, 1e-5)  # 3e-3 and more when computed in half precision


# ---- packed and padded rows


@pytest.mark.parametrize("lengths", [[2, 3, 1], [3], [0, 2, 0], [1, 1], []])
@pytest.mark.parametrize("extra", [(), (4,)])
def test_pad_rows_puts_each_row_at_its_place(lengths, extra):
    flat = draw(sum(lengths), *extra, seed=3)
    padded = pad_rows(flat, lengths, value=-9.0)
    assert padded.shape == (len(lengths), max(lengths, default=0), *extra)
    rows = iter(flat)
    for b, t in itertools.product(*map(range, padded.shape[:2])):
        expected = next(rows) if t < lengths[b] else torch.full(extra, -9.0, dtype=torch.float64)
        assert torch.equal(padded[b, t], expected)
    mask = length_mask(lengths)
    assert torch.equal(padded[mask], flat)
    assert torch.equal(pad_rows(flat, torch.tensor(lengths)), padded.where(padded != -9.0, 0))


def test_gradients_pass_through_padding():
    lengths, weights = [2, 1], torch.tensor([[1.0, 2.0], [3.0, math.nan]], dtype=torch.float64)
    mask = length_mask(lengths)

    def there_and_back(flat):
        return (pad_rows(flat, lengths) * weights)[mask].square().sum()

    assert gradient_of(there_and_back, torch.ones(3, dtype=torch.float64)).tolist() == [2.0, 8.0, 18.0]
    ids = pad_rows(torch.tensor([5, 6, 7]), lengths, value=1)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[5, 6], [7, 1]]


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_lengths_that_do_not_add_up_are_refused(num_tokens):
    with pytest.raises(ValueError, match=f"add up to 3 but there are {num_tokens} tokens"):
        pad_rows(torch.ones(num_tokens), [2, 1])


def test_length_mask_of_a_given_width():
    assert length_mask([1, 3], width=2).tolist() == [[True, False], [True, True]]
    assert length_mask(torch.tensor([0]), width=1).tolist() == [[False]]


# ---- token losses: policy, value, language model


POLICY, VALUE = ["new_logprobs", "logprobs", "advantages"], ["new_values", "values", "returns"]
ALL_CLIPS = {"clip_range": CLIP_RANGE, "clip_range_high": 0.5, "dual_clip": 1.7}
TOKEN_LOSSES = {
    "policy": (policy_loss, ALL_CLIPS, POLICY),
    "weighted policy": (policy_loss, ALL_CLIPS, [*POLICY, "weights"]),
    "penalty": (penalty_loss, {"policy_kl_coef": 0.7}, POLICY),
    "weighted penalty": (penalty_loss, {"policy_kl_coef": 0.7}, [*POLICY, "weights"]),
    "entropy": (entropy_bonus, {}, ["entropy"]),
    "weighted entropy": (entropy_bonus, {}, ["entropy", "weights"]),
    "kl": (kl_loss, {}, ["kl"]),
    "weighted kl": (kl_loss, {}, ["kl", "weights"]),
    "sequence k2": (sequence_k2_loss, {}, ["new_logprobs", "ref_logprobs"]),
    "weighted sequence k2": (sequence_k2_loss, {}, ["new_logprobs", "ref_logprobs", "weights"]),
    "value": (value_loss, {"value_clip_range": 0.5}, VALUE),
    "unclipped value": (value_loss, {"value_clip_range": None}, VALUE),
    "weighted value": (value_loss, {"value_clip_range": 0.5}, [*VALUE, "weights"]),
    "language model": (lm_loss, {}, ["token_logprobs"]),
}
"""Their values are those of tests/golden, and of the loops of tests/ppo/test_ppo_losses.py."""


@pytest.fixture(params=TOKEN_LOSSES)
def token_loss(request):
    """(function of a batch, a mask and num_tokens; names of the tensors)."""
    function, options, names = TOKEN_LOSSES[request.param]

    def loss(batch, mask, num_tokens=None):
        weights = {"weights": batch["weights"]} if "weights" in names else {}
        tensors = [batch[name] for name in names if name != "weights"]
        return function(*tensors, mask, **options, **weights, num_tokens=num_tokens)

    return loss, names


def loss_and_gradient(loss, batch, mask, num_tokens=None):
    """Loss, stats, and the gradient of the first tensor of the batch."""
    name, x = next(iter(batch.items()))
    x = x.detach().clone().requires_grad_()
    value, stats = loss(batch | {name: x}, mask, num_tokens)
    assert value.dtype == torch.float64
    assert all(stat.dtype == torch.float64 and not stat.requires_grad for stat in stats.values())
    return value.detach(), stats, torch.autograd.grad(value, x)[0]


def same(actual, expected):
    close(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for key in expected[1]:
        close(actual[1][key], expected[1][key])
    close(actual[2], expected[2])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_padding_changes_neither_loss_nor_stats_nor_gradient(token_loss, garbage):
    loss, names = token_loss
    batch, mask = response_batch(names)
    expected = loss_and_gradient(loss, batch, mask)
    wide, wide_mask = padded_with(batch, mask, garbage)
    actual = loss_and_gradient(loss, wide, wide_mask)
    assert (actual[2][~wide_mask] == 0).all()
    same((*actual[:2], actual[2][:, : mask.shape[1]]), expected)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [1, 3], [3, 1, 0]])
def test_microbatches_of_a_token_loss_add_up(token_loss, sizes):
    loss, names = token_loss
    batch, mask = response_batch(names)
    parts = []
    for rows in torch.arange(len(LENGTHS)).split(sizes):
        part = {name: x[rows] for name, x in batch.items()}
        parts.append(loss_and_gradient(loss, part, mask[rows], mask.sum()))
    summed = {key: sum(stats[key] for _, stats, _ in parts) for key in parts[0][1]}
    total = sum(part[0] for part in parts), summed, torch.cat([part[2] for part in parts])
    same(total, loss_and_gradient(loss, batch, mask))
    same(total, loss_and_gradient(loss, batch, mask, num_tokens=sum(LENGTHS)))


def test_a_token_loss_without_real_tokens_is_0_with_num_tokens_and_nan_without(token_loss):
    loss, names = token_loss
    batch, mask = response_batch(names)
    value, stats, gradient = loss_and_gradient(loss, batch, mask & False, num_tokens=7)
    assert value == 0
    assert not gradient.any()
    assert not any(stats.values())
    value, stats = loss(batch, mask & False)
    assert value == 0 if "weights" in names else value.isnan()
    assert all(stat.isnan() for stat in stats.values())


def test_clip_range_high_of_0_is_not_none():
    mask, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.float64)
    loss, _ = policy_loss(zero + 0.1, zero, zero + 1, mask, clip_range=0.2, clip_range_high=0.0)
    assert loss == -1.0


def test_a_small_kl_is_accurate_in_float32():
    logprobs, new_logprobs = torch.zeros(1, 1), torch.full((1, 1), 1e-3)
    stats = policy_loss(new_logprobs, logprobs, logprobs, length_mask([1]), clip_range=CLIP_RANGE)[1]
    expected = 1e-3**2 / 2 + 1e-3**3 / 6
    assert float(stats["policy/approx_kl"]) == pytest.approx(expected, rel=1e-3)
    assert float(kl_estimate(-new_logprobs, logprobs, estimator="k3")) == pytest.approx(expected, rel=1e-3)


def test_explained_variance():
    values, returns = draw(20, seed=1), draw(20, seed=2)
    expected = 1 - (returns - values).var() / returns.var()
    close(explained_variance(values + 5, returns), expected)
    equal = torch.full((20,), 0.1)  # their float32 mean is not exactly 0.1
    assert explained_variance(values.float(), equal) == 0
    assert explained_variance(values[:0], returns[:0]) == 0


# ---- rewards and advantages


def test_the_score_is_at_the_last_real_token_of_a_mask_with_holes():
    mask = torch.tensor([[True, False, True, False], [False, True, False, False]])
    rewards = token_rewards(torch.tensor([1.0, 2.0]), torch.ones(2, 4), mask, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 0, 0.5, 0], [0, 1.5, 0, 0]]


def test_a_score_for_a_row_without_real_tokens_is_refused():
    with pytest.raises(ValueError, match=r"no real token in rows \[1, 3\] of 4"):
        token_rewards(torch.ones(4), torch.ones(4, 2), length_mask([1, 0, 2, 0]), kl_coef=0.1)


def test_gae_ignores_holes_in_the_mask():
    batch, _ = response_batch(["rewards", "values"])
    mask = torch.tensor([[True, False, True, True, False]]).expand(4, 5)
    options = {"gamma": 0.9, "gae_lambda": 0.8}
    results = gae(batch["rewards"], batch["values"], mask, **options)
    short = [batch[name][:, [0, 2, 3]] for name in ("rewards", "values")]
    for x, expected in zip(results, gae(*short, torch.ones(4, 3, dtype=torch.bool), **options), strict=True):
        close(x[:, [0, 2, 3]], expected)
        assert not x[~mask].any()


def test_no_gradient_leaks_through_rewards_advantages_or_returns():
    batch, mask = response_batch(["kl", "values"])
    kl, values = (x.requires_grad_() for x in batch.values())
    rewards = token_rewards(torch.ones(4, requires_grad=True), kl, mask, kl_coef=0.1)
    targets = gae(kl, values, mask, gamma=1.0, gae_lambda=0.95)
    assert not any(x.requires_grad for x in (rewards, *targets))


# ---- reward model


def test_the_unbiased_loss_finds_the_true_scores_behind_flipped_labels():
    """Four answers, all pairs at their true rates, 30 % of the labels flipped: the optimum is known."""
    true = torch.tensor([1.5, 0.5, -0.5, -1.5], dtype=torch.float64)
    first, second = torch.combinations(torch.arange(4)).T
    rate = (true[first] - true[second]).sigmoid()
    seen = 0.7 * rate + 0.3 * (1 - rate)

    def optimum(flipped_weight):
        scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        search = torch.optim.LBFGS([scores], max_iter=200, tolerance_grad=1e-10, tolerance_change=0.0)

        def loss():
            search.zero_grad()
            pairs = ((first, second, seen), (second, first, 1 - seen))
            total = sum(
                pairwise_loss(scores[a], scores[b], weight=share, flipped_weight=flipped_weight)[0]
                for a, b, share in pairs
            )
            total.backward()
            return total

        search.step(loss)
        return scores.detach() - scores.detach().mean()

    close(optimum(unbiased_weight(0.3)), true, 1e-6)
    blind, smoothed = optimum(0.0), optimum(0.1)
    assert blind[0] < 0.5 * true[0]
    assert smoothed[0] < blind[0], "smoothing flips some more"


def test_plackett_luce_is_a_probability_of_rankings_and_bradley_terry_for_two():
    scores = draw(4, seed=1, scale=2)
    orders = [list(order) for order in itertools.permutations(range(4))]
    likelihoods = [math.exp(-3 * plackett_luce_loss(scores[order], [4])) for order in orders]
    assert sum(likelihoods) == pytest.approx(1, abs=1e-12)
    for order, likelihood in zip(orders, likelihoods, strict=True):
        by_hand, left = 1.0, scores.exp()[order].tolist()
        while left:
            by_hand *= left[0] / sum(left)
            left = left[1:]
        assert likelihood == pytest.approx(by_hand, rel=1e-12)

    pairs = draw(10, seed=2).float().requires_grad_()
    losses = [plackett_luce_loss(pairs, [2] * 5), pairwise_loss(pairs[0::2], pairs[1::2])[0]]
    assert torch.equal(*losses)
    assert torch.equal(*(torch.autograd.grad(loss, pairs)[0] for loss in losses))

    flat, sizes = draw(9, seed=3), [2, 4, 3]
    parts = [plackett_luce_loss(one, [len(one)], num_rankings=3) for one in flat.split(sizes)]
    close(plackett_luce_loss(flat, sizes), sum(parts))
    close(
        gradient_of(lambda x: plackett_luce_loss(x, sizes), flat),
        finite_differences(lambda x: plackett_luce_loss(x, sizes), flat),
        1e-7,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["logsigmoid", "logexp"])
def test_extreme_score_differences_have_a_finite_loss_and_gradient(kind, dtype):
    for difference, expected, expected_gradient in (
        (-200.0, 200.0, -1.0),
        (-2000.0, 2000.0, -1.0),
        (2000.0, 0.0, 0.0),
    ):
        chosen = torch.tensor([difference], dtype=dtype)
        rejected = torch.zeros(1, dtype=dtype)
        assert pairwise_loss(chosen, rejected, loss=kind)[0] == expected
        gradient = gradient_of(lambda x, zero=rejected: pairwise_loss(x, zero, loss=kind)[0], chosen)
        assert gradient.tolist() == [expected_gradient]


# ---- statistics


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (5, 10), (3.5, 8), (1, 1), (700, 1000)])
def test_the_rate_is_z_standard_errors_from_the_ends_of_the_wilson_interval(successes, n):
    low, high = wilson_interval(successes, n)
    rate = successes / n
    assert 0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1
    for end in (low, high):  # solves |rate - end| = z * sqrt(end * (1 - end) / n), unless it is 0 or 1
        close((rate - end) ** 2, 1.96**2 * end * (1 - end) / n, 1e-9)
    assert high - low > 0.001
    assert wilson_interval(0, 0) == (0.0, 1.0)


def pearson_by_loops(x, y):
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    xy = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return xy / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


def rank_by_loops(x):
    return [sum(b < a for b in x) + (sum(b == a for b in x) + 1) / 2 for a in x]


def test_pearson_and_spearman():
    x, y = draw(30, seed=1), draw(30, seed=2)
    y = y + 0.5 * x
    close(pearson(x, y), pearson_by_loops(x.tolist(), y.tolist()))
    tied_x, tied_y = (2 * x).round(), y.round()
    for a, b in ((x, y), (tied_x, y), (tied_x, tied_y)):
        ranks = rank_by_loops(a.tolist()), rank_by_loops(b.tolist())
        close(spearman(a, b), pearson_by_loops(*ranks))
    close(spearman(x, x.exp()), 1.0)
    close(spearman(x, -(x**3)), -1.0)
    close(pearson(x + 1e6, y), pearson(x, y), 1e-8)
    close(pearson(torch.tensor([1, 2, 4]), torch.tensor([1.0, 2.0, 4.0])), 1.0)


@pytest.mark.parametrize("correlation", [pearson, spearman])
def test_correlation_of_a_constant_is_0_and_of_nan_is_nan(correlation):
    x = torch.tensor([1.0, 2.0, 3.0])
    for other in (torch.full((3,), 0.1), torch.zeros(3)):
        assert correlation(x, other) == 0.0
        assert correlation(other, x) == 0.0
    assert correlation(x[:1], x[:1]) == 0.0
    assert correlation(x[:0], x[:0]) == 0.0
    assert math.isnan(correlation(x, torch.tensor([1.0, math.nan, 2.0])))


def test_distinct_n():
    sequences = [[1, 2, 3], [1, 2], [7], []]
    assert distinct_n(sequences, 1) == 4 / 6
    assert distinct_n(sequences, 2) == 2 / 3  # 12 23, 12; no n-gram crosses from one sequence into the next
    assert distinct_n(sequences, 3) == 1.0
    assert distinct_n(sequences, 4) == 0.0
    assert distinct_n([], 1) == 0.0


def test_pair_accuracy_counts_pairs_with_different_targets():
    x = torch.tensor([0.3, 0.1, 0.4, 0.4, -2.0], dtype=torch.float64)
    y = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    right = sum(1.0 if x[i] > x[j] else 0.5 if x[i] == x[j] else 0.0 for i in range(5) for j in range(5) if y[i] > y[j])
    close(pair_accuracy(x, y), right / 6)
    close(pair_accuracy(-x, y), 1 - right / 6)
    assert pair_accuracy(x, torch.ones(5)) == 0.5


# ------------------------------------------------------------------------------------------------- the exponential tilt


# ref_policy gives the three responses to each prompt these probabilities: four samples show them exactly.
PROBABILITIES = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
SCORES = torch.tensor([[0.0, 1.0, 3.0], [2.0, -1.0, -1.5]], dtype=torch.float64)
SAMPLES = SCORES[:, [0, 0, 1, 2]]


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_tilt_of_exact_frequencies_is_the_optimum_of_the_objective(beta):
    weights, kl = exponential_tilt(SAMPLES, beta=beta)
    unnormalised = PROBABILITIES * (SCORES / beta).exp()
    optimum = unnormalised / unnormalised.sum(1, keepdim=True)
    torch.testing.assert_close(torch.stack([weights[:, :2].sum(1), weights[:, 2], weights[:, 3]], 1), optimum)
    torch.testing.assert_close(kl, (optimum * (optimum / PROBABILITIES).log()).sum(1))
    objective = (weights * SAMPLES).sum(1) - beta * kl
    torch.testing.assert_close(objective, beta * unnormalised.sum(1).log(), msg="at pi* J is beta * log Z")


def test_the_two_ends_of_the_tilt():
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 5.0, 1.0]])
    weights, kl = exponential_tilt(scores, beta=1e-6)  # only the best samples are left: one, and two
    torch.testing.assert_close((weights * scores).sum(1), torch.tensor([4.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(kl, torch.tensor([4.0, 2.0], dtype=torch.float64).log())
    weights, kl = exponential_tilt(scores, beta=1e9)
    torch.testing.assert_close((weights * scores).sum(1), scores.double().mean(1))
    assert kl.abs().max() < 1e-12


def test_beta_is_one_number_for_the_mean_kl_of_all_prompts():
    kl = exponential_tilt(SAMPLES, beta=0.7)[1].mean().item()
    assert tilt_beta(SAMPLES, kl) == pytest.approx(0.7, rel=1e-9)
    assert tilt_beta(10 * SAMPLES.float() + 3, kl) == pytest.approx(7.0, rel=1e-5), "in units of the score"


@pytest.mark.parametrize("kl", [0.0, -0.1, math.nan, math.log(4), 1.05])
def test_a_kl_that_the_samples_cannot_express_is_refused(kl):
    """The second prompt's two best samples are equal, so the mean KL stays below (log(4) + log(2)) / 2 = 1.04."""
    with pytest.raises(ValueError, match=r"must be above 0 and below 1\.040, .* 4 samples"):
        tilt_beta(SAMPLES, kl)


def test_scores_that_are_all_equal_express_no_kl():
    assert exponential_tilt(torch.ones(1, 3), beta=0.1)[1].abs().item() < 1e-12
    with pytest.raises(ValueError, match=r"below 0\.000"):
        tilt_beta(torch.ones(1, 3), 0.1)
