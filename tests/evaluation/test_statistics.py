"""The statistics of evaluations: known answers, slow oracles, and simulations of the coverage of intervals."""

import itertools
import math

import pytest
import torch

from rlhf_cli.algorithms.best_of_n import best_of_n, best_of_n_kl, best_of_n_kl_bound
from rlhf_cli.algorithms.calibration import best_temperature, calibration_error, reliability
from rlhf_cli.algorithms.comparison import bradley_terry, length_controlled_win_rate
from rlhf_cli.algorithms.counts import cohen_kappa
from rlhf_cli.algorithms.overoptimization import fit_gold_curve
from rlhf_cli.algorithms.statistics import (
    bootstrap_interval,
    distinct_n,
    distinct_n_interval,
    kendall,
    newcombe_interval,
)
from rlhf_cli.evaluation.figures import mean_figure
from rlhf_cli.evaluation.replies import Replies
from rlhf_cli.evaluation.yardstick import share_of_gain, tilted


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def covered(truth, intervals):
    """The share of the intervals that hold the truth."""
    held = [low <= truth <= high for low, high in intervals]
    return sum(held) / len(held)


@pytest.mark.parametrize("size", [12, 60])
def test_intervals_cover_the_mean_in_95_percent_of_1000_simulations(size):
    def interval(run):
        values = 0.3 + torch.randn(size, generator=generator(run), dtype=torch.float64)
        return bootstrap_interval(lambda rows: rows.mean(-1), values, seed=run, num_resamples=600)

    assert 0.93 <= covered(0.3, map(interval, range(1000))) <= 0.97


def test_kappa_of_known_examples():
    """Cohen 1960, table 1, and Fleiss, Levin and Paik 2003, table 18.1."""
    assert cohen_kappa([[88, 14, 18], [10, 40, 10], [2, 6, 12]])[0] == pytest.approx(0.492, abs=1e-3)
    assert cohen_kappa([[75, 1, 4], [5, 4, 1], [0, 0, 10]])[0] == pytest.approx(0.676, abs=1e-3)
    assert cohen_kappa([[0, 5], [5, 0]])[0] == -1.0
    assert all(math.isnan(x) for table in ([[7, 0], [0, 0]], [[0]], []) for x in cohen_kappa(table))


@pytest.mark.parametrize(("size", "truth"), [(40, 0.4), (40, 0.9), (200, 0.7)])
def test_the_interval_of_kappa_covers_it_in_95_percent_of_1000_simulations(size, truth):
    """The labels of a pair are first, second or tie. With probability kappa both labellers give the same draw."""
    shares, draw = torch.tensor([0.45, 0.45, 0.1]), generator()
    a, b = (torch.multinomial(shares, 1000 * size, replacement=True, generator=draw) for _ in range(2))
    b = torch.where(torch.rand(1000 * size, generator=draw) < truth, a, b)
    tables = [torch.bincount(cells, minlength=9).view(3, 3).tolist() for cells in (3 * a + b).view(1000, size)]
    assert 0.93 <= covered(truth, (cohen_kappa(table)[1:] for table in tables)) <= 0.98


@pytest.mark.parametrize(("p_before", "p_after"), [(0.97, 0.99), (0.99, 0.99), (0.5, 0.8)])
def test_newcombes_intervals_cover_the_difference_of_two_paired_rates(p_before, p_after):
    # The same uniforms decide both, so the columns are correlated.
    uniform = torch.rand(1000, 256, generator=generator(), dtype=torch.float64)
    own = torch.where(torch.rand(1000, 256, generator=generator(1)) < 0.5, uniform, uniform.flip(0))
    intervals = [newcombe_interval(*rows) for rows in zip(own < p_after, uniform < p_before, strict=True)]
    assert all(low < high for low, high in intervals)
    assert covered(p_after - p_before, intervals) >= 0.93


def test_intervals_at_equal_length_cover_it_in_95_percent_of_1000_simulations():
    """Longer replies win more often, and those of A are longer."""

    def interval(run):
        d = 1 + torch.randn(200, generator=generator(run), dtype=torch.float64)
        p = torch.sigmoid(0.5 + torch.tanh(d / d.std(correction=0)))
        won = (torch.rand(200, generator=generator(run + 5000), dtype=torch.float64) < p).double()
        return length_controlled_win_rate(won, d, torch.zeros_like(d))[1:]

    assert 0.93 <= covered(1 / (1 + math.exp(-0.5)), map(interval, range(1000))) <= 0.97


@pytest.mark.parametrize("size", [5, 10])
def test_intervals_of_the_gold_curve_cover_a_and_b_in_95_percent_of_1000_simulations(size):
    d = torch.linspace(0.3, 3.0, size, dtype=torch.float64)
    rows = 1.0 + d * (1.5 - 0.8 * d.log()) + 0.1 * torch.randn(1000, size, generator=generator(), dtype=torch.float64)
    curves = [fit_gold_curve(d, row, start=1.0) for row in rows]
    assert 0.93 <= covered(1.5, ((c.a - c.error_a, c.a + c.error_a) for c in curves)) <= 0.97
    assert 0.93 <= covered(0.8, ((c.b - c.error_b, c.b + c.error_b) for c in curves)) <= 0.97


def test_an_interval_resamples_paired_columns_together_repeats_with_its_seed_and_needs_two_rows():
    a = torch.randn(50, generator=generator())
    paired = bootstrap_interval(lambda x, y: (y - x).mean(-1), a, a + 1, seed=0)
    assert paired == pytest.approx((1, 1), abs=1e-6)
    first, same, other = (mean_figure(torch.arange(9.0), seed=seed) for seed in (3, 3, 4))
    assert first == same != other
    assert all(math.isnan(mean_figure(torch.ones(n), seed=seed).low) for n, seed in ((1, 0), (9, None)))


def test_bins_of_confidence_start_at_one_half():
    bins = reliability(torch.tensor([0.5, 0.76, 1.0]), torch.tensor([0.0, 1.0, 1.0]), low=0.5, num_bins=2)
    assert [(b.low, b.high, b.count) for b in bins] == [(0.5, 0.75, 1), (0.75, 1.0, 2)]


def test_the_best_temperature_undoes_an_overconfident_scale():
    true_margin = torch.randn(100_000, generator=generator(3), dtype=torch.float64) * 2
    right = torch.rand(100_000, generator=generator(4), dtype=torch.float64) < torch.sigmoid(true_margin)
    margin = torch.where(right, true_margin, -true_margin) * 3  # three times too sure
    assert best_temperature(margin).item() == pytest.approx(3, rel=0.03)
    assert best_temperature(torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]])).tolist() == [0, 0, math.inf]
    assert best_temperature(torch.tensor([1.0, -2.0])) == math.inf


def test_the_batched_calibration_figures_are_those_of_each_row():
    margin = torch.randn(3, 50, generator=generator(5), dtype=torch.float64) + 0.5
    confidence, right = torch.sigmoid(margin.abs()), (margin > 0).double()
    errors, temperatures = calibration_error(confidence, right, low=0.5), best_temperature(margin)
    for i in range(3):
        bins = [b for b in reliability(confidence[i], right[i], low=0.5) if b.count]
        expected = sum(b.count * abs(b.frequency - b.confidence) for b in bins) / 50
        assert errors[i].item() == pytest.approx(expected)
        assert temperatures[i].item() == pytest.approx(best_temperature(margin[i]).item())


def test_the_interval_of_distinct_words_is_that_of_leaving_out_each_text():
    texts = [["a", "b", "c"], ["a", "d"], ["b", "b", "e", "f"], ["a"]]
    without = [distinct_n(texts[:i] + texts[i + 1 :], 1) for i in range(4)]
    mean = sum(without) / 4
    half = 1.96 * math.sqrt(3 / 4 * sum((x - mean) ** 2 for x in without))
    assert distinct_n_interval(texts, 1) == pytest.approx((max(0, 0.6 - half), min(1, 0.6 + half)))


def test_best_of_n_is_the_mean_over_all_subsets():
    score = torch.tensor([[0.3, 1.7, -2.0, 1.7, 0.9, 0.3]], dtype=torch.float64)
    gold = torch.tensor([[5.0, 1.0, 2.0, 3.0, 4.0, 0.0]], dtype=torch.float64)
    for n in range(1, 7):
        best, others = [], []
        for subset in itertools.combinations(range(6), n):
            top = max(score[0, i].item() for i in subset)
            # A subset that holds one of two equal scores counts for both: they are exchangeable.
            tied = [i for i in range(6) if score[0, i] == top]
            best.append(top)
            others.append(sum(gold[0, i].item() for i in tied) / len(tied))
        found, found_gold = best_of_n(score, n, gold)
        assert found.item() == pytest.approx(sum(best) / len(best))
        assert found_gold.item() == pytest.approx(sum(others) / len(others))
    with pytest.raises(ValueError, match="must be 1 to 6"):
        best_of_n(score, 7)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("size", [2, 3, 50, 4000])
def test_the_kl_estimate_against_the_exact_kl_of_equally_likely_outcomes(n, size):
    rank = torch.arange(1, size + 1, dtype=torch.float64)
    chosen = (rank / size) ** n - ((rank - 1) / size) ** n  # distribution of best-of-n
    exact = torch.xlogy(chosen, chosen * size).sum().item()
    estimate = (chosen * best_of_n_kl(torch.full((size,), -math.log(size), dtype=torch.float64), n)).sum().item()
    bound = best_of_n_kl_bound(n)
    # With few outcomes the estimate is too high, but never above the bound.
    assert exact - 1e-9 <= estimate <= bound + 1e-9
    if size >= 50:
        assert estimate == pytest.approx(exact, rel=0.1, abs=1e-9)
    if size == 4000:
        assert estimate == pytest.approx(bound, abs=0.01)


def test_the_peak_of_a_gold_curve():
    d = torch.arange(0.01, 6.0, 0.01, dtype=torch.float64)
    gold = 2.0 + d * (1.5 - 0.8 * d.log())
    assert fit_gold_curve(d, gold, start=2.0).peak == pytest.approx(d[gold.argmax()].item(), abs=0.01)
    d = torch.tensor([1.0, 2.0])
    assert fit_gold_curve(d, d, start=0.0).peak is None, "it never falls"
    d = torch.tensor([0.5, 1.0, 2.0, 3.0])
    assert math.isnan(fit_gold_curve(d, d.sqrt(), start=0.0).error_a), "four points give no interval"
    with pytest.raises(ValueError, match="two different distances"):
        fit_gold_curve(torch.tensor([1.0, 1.0]), torch.zeros(2), start=0.0)


def test_the_win_rate_at_equal_length_is_finite_where_one_side_always_wins_and_has_no_interval_of_one_row():
    always = length_controlled_win_rate(torch.ones(20), torch.arange(20.0), torch.zeros(20))[0]
    assert 0.5 < always < 1
    one = torch.ones(1)
    assert [math.isnan(x) for x in length_controlled_win_rate(one, one, one)] == [False, True, True]


def test_bradley_terry_recovers_strengths():
    truth = torch.tensor([0.8, 0.1, -0.9], dtype=torch.float64)
    won = torch.zeros(3, 3)
    for i, j in itertools.permutations(range(3), 2):
        won[i, j] = 10_000 * torch.sigmoid(truth[i] - truth[j])
    assert torch.allclose(bradley_terry(won), truth, atol=1e-3)
    assert bradley_terry(torch.tensor([[0.0, 9.0], [0.0, 0.0]])).isfinite().all()


def test_kendall_with_ties_against_all_pairs():
    x = torch.tensor([1.0, 2.0, 2.0, 4.0, 0.0])
    y = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0])
    alike = untied_x = untied_y = 0
    for i, j in itertools.combinations(range(5), 2):
        a, b = (x[i] > x[j]) * 1 - (x[i] < x[j]) * 1, (y[i] > y[j]) * 1 - (y[i] < y[j]) * 1
        alike, untied_x, untied_y = alike + a * b, untied_x + abs(a), untied_y + abs(b)
    assert kendall(x, y).item() == pytest.approx(float(alike) / math.sqrt(float(untied_x) * float(untied_y)))
    assert kendall(torch.zeros(3), x[:3]) == 0.0


def test_the_tilt_of_two_samples_and_a_share_of_a_gain():
    """The tilt of two equally likely samples with scores 10 and 11 has the weights 1/4 and 3/4 at a KL of 0.130812."""
    zero, score = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([[10.0, 11.0]] * 4, dtype=torch.float64)
    tilt, _ = tilted(Replies([], [], score, {}, {}, zero - math.log(2), zero, [], zero, zero), 0.130812)
    assert tilt.mean().item() == pytest.approx(10.75, abs=1e-4)
    share = share_of_gain(*(torch.tensor(x) for x in ([2.0, 3.0], [4.0, 5.0], [1.0, 2.0])), seed=0)
    assert share.value == pytest.approx((2.5 - 1.5) / (4.5 - 1.5)), "it counts from the start"
