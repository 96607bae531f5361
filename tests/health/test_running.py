"""The health rules: each finds its problem, finds nothing in a good run, and does not repeat itself too often."""

import json
import math
import random
import re
import statistics
from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.health.ppo_rules import MUST_BE_FINITE, STOPS, WARNINGS
from rlhf_cli.health.running import REPEAT, SHOWN, Health
from rlhf_cli.training.bad_steps import no_gradient
from rlhf_cli.training.supervised import memorises
from support.paths import ROOT
from support.tiny import read_jsonl

Row = dict[str, float]
COLUMNS = (
    "objective/score",
    "objective/score_std",
    "objective/kl",
    "response/length",
    "response/eos_fraction",
    "response/empty_fraction",
    "response/distinct_2",
    "response/duplicate_fraction",
    "response/score_length_correlation",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_fraction",
    "value/explained_variance",
)


# Iterations 1 to 12, 15, 20, ... 50 of configs/support/ppo.yaml, rounded: gold rose from 1.97 to 4.48 of 5.
SUPPORT = (
    (0.00579, 1.04, 0, 25.4, 1, 0, 0.433, 0.0312, -0.134, 0.355, 0.000374, 0.000907, 0),
    (0.222, 1.2, 0.000294, 23.8, 1, 0.0156, 0.445, 0, 0.18, 0.361, 0.000394, 0.00133, 0.00707),
    (0.198, 0.994, 0.0725, 24.8, 1, 0, 0.419, 0.0312, 0.0135, 0.358, 0.00323, 0.00898, 0.0361),
    (0.742, 0.959, 0.358, 24.5, 1, 0, 0.448, 0, 0.0864, 0.35, 0.00184, 0.0119, 0.0858),
    (0.912, 1.1, 0.731, 25.2, 1, 0, 0.461, 0, 0.207, 0.338, 0.00234, 0.0122, 0.155),
    (0.762, 0.971, 1.04, 27.3, 1, 0, 0.442, 0.0312, -0.17, 0.307, 0.00358, 0.00903, 0.141),
    (0.975, 0.993, 1.33, 26.1, 1, 0, 0.432, 0, 0.0371, 0.319, 0.00336, 0.0108, 0.283),
    (1.12, 0.986, 1.9, 25.9, 1, 0, 0.421, 0, 0.415, 0.306, 0.00376, 0.00784, 0.379),
    (1.18, 0.901, 2.08, 25, 1, 0, 0.432, 0, 0.289, 0.308, 0.00713, 0.0109, 0.389),
    (1.37, 0.884, 1.91, 27.5, 1, 0, 0.424, 0, 0.0993, 0.293, 0.00385, 0.00487, 0.567),
    (1.52, 0.692, 1.94, 25.5, 1, 0, 0.421, 0, 0.555, 0.295, 0.000621, 0.0049, 0.361),
    (1.48, 0.697, 2.54, 26.7, 1, 0, 0.409, 0, 0.252, 0.277, 0.00183, 0.00725, 0.6),
    (1.73, 0.659, 4.03, 27.8, 1, 0, 0.382, 0, 0.341, 0.251, 0.00295, 0.00477, 0.636),
    (1.81, 0.446, 3.25, 29.2, 1, 0, 0.372, 0, 0.0658, 0.244, 0.000311, 0.00215, 0.52),
    (1.87, 0.406, 3.37, 27.2, 1, 0, 0.354, 0, 0.441, 0.239, 9.1e-05, 0.000574, 0.61),
    (1.81, 0.549, 3, 27.6, 1, 0, 0.385, 0, 0.483, 0.229, 0.00106, 0.00253, 0.383),
    (1.88, 0.461, 3.47, 27.6, 1, 0, 0.374, 0, 0.429, 0.21, 0.000106, 0.00114, 0.593),
    (1.95, 0.271, 3.97, 28.1, 1, 0, 0.373, 0, 0.419, 0.198, 5.04e-05, 0.000557, 0.557),
    (1.82, 0.496, 3.28, 28.4, 1, 0, 0.364, 0, -0.0954, 0.244, 1.52e-05, 0.000274, 0.55),
    (1.88, 0.507, 3.49, 27.8, 1, 0, 0.357, 0, 0.629, 0.21, 4.19e-07, 0, 0.649),
)


# Metrics that every iteration of it had.
ALWAYS = {
    "objective/reward": 0.5,
    "objective/kl_coef": 0.1,
    "policy/ratio": 0.999,
    "policy/first_ratio": 1.0,
    "policy/first_ratio_error": 0.0,
    "policy/grad_norm": 0.3,
    "policy/sampler_gap": 3.3e-6,
    "policy/skipped_steps": 0.0,
    "policy/stopped_early": 0.0,
    "loss/policy": -0.001,
    "loss/value": 0.1,
    "value/error": 0.2,
}


GOOD = [ALWAYS | dict(zip(COLUMNS, row, strict=True)) for row in SUPPORT]
STEADY = GOOD[0] | {"objective/score": 1.0, "objective/score_std": 1.0, "value/explained_variance": 0.5}


CONFIG = load_config(ROOT / "configs/hh/ppo.yaml", PPOConfig)


def new_health(precision="float32", **changes):
    """`changes` of the config are by key, with __ after the section."""
    config = CONFIG
    for key, value in changes.items():
        section, _, name = key.partition("__")
        new = getattr(config, section).model_copy(update={name: value}) if name else value
        config = config.model_copy(update={section: new})
    return Health(config, precision)


def sequence(num_iterations, columns):
    """Rows of a steady run, with columns that are a constant, a list whose last value goes on, or a function
    of the iteration."""

    def value(column, i):
        if callable(column):
            return column(i)
        return column[min(i, len(column)) - 1] if isinstance(column, Sequence) else column

    return [STEADY | {key: value(c, i) for key, c in columns.items()} for i in range(1, num_iterations + 1)]


def findings_of(rows, health=None):
    health = health or new_health()
    return [(i, finding) for i, row in enumerate(rows, 1) for finding in health.check(i, row)]


def names_of(rows, health=None):
    return [(i, finding.name) for i, finding in findings_of(rows, health)]


# ------------------------------------------------------------------------------------------- a run that is well


def test_nothing_is_found_in_a_good_run():
    assert names_of(GOOD) == []
    assert names_of(GOOD + GOOD[12:] * 20) == []
    assert names_of([STEADY] * 60) == []
    assert new_health().line([], GOOD[0]) == "healthy: score 0.00579, KL 0, length 25.4, entropy 0.355"


@pytest.mark.parametrize("key", sorted(STEADY))
def test_a_metric_may_be_absent_or_nan(key):
    rows = GOOD + GOOD[12:] * 3
    assert names_of([{k: v for k, v in row.items() if k != key} for row in rows]) == []
    if key not in (*MUST_BE_FINITE, "policy/first_ratio_error"):
        assert names_of([row | {key: math.nan} for row in rows]) == []


def test_without_metrics_nothing_is_found():
    health = new_health()
    assert names_of([{}] * 40, health) == []
    assert health.line([], {}) == "healthy"


def test_a_metric_that_is_sometimes_absent_is_judged_by_the_rows_that_have_it():
    low = [STEADY | {"policy/entropy": 0.02}] * 3
    absent = [{k: v for k, v in STEADY.items() if k != "policy/entropy"}] * 2
    assert names_of([*absent, STEADY, *low]) == [(6, "entropy_collapse")]
    assert names_of([STEADY] * 3 + [low[0], absent[0]] * 10) == []
    # Scores below those of the first row that has one: the best is below the start.
    late = [{"objective/score": 5.0}, {}, *[{"objective/score": 1.0, "objective/kl": 9.0}] * 8]
    assert names_of(late) == []


# ---------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("error", [5.1e-3, 0.3, math.inf, math.nan])
def test_a_first_ratio_that_is_not_one_stops_at_any_iteration(error):
    rows = sequence(4, {"policy/first_ratio_error": [0.0, 4.9e-3, error, 0.0]})
    (iteration, finding), *others = findings_of(rows)
    assert (iteration, finding.name, finding.severity) == (3, "ratio_not_one", "stop")
    assert others == []
    for cause in ("Dropout", "temperature", "position ids", "tokenized again", "ref_policy"):
        assert cause in finding.message


def test_the_mean_ratio_is_used_if_the_largest_error_is_absent():
    rows = [{"policy/first_ratio": 0.994}, {"policy/first_ratio": 1.004}]
    assert names_of(rows) == [(1, "ratio_not_one")]
    # If the error is logged, the mean is not used: it is 1 for two policies that are far apart.
    assert names_of([{"policy/first_ratio": 1.0, "policy/first_ratio_error": 0.2}]) == [(1, "ratio_not_one")]


def test_the_tolerance_is_that_of_the_precision():
    rows = sequence(2, {"policy/first_ratio_error": 0.4, "policy/sampler_gap": 0.9, "objective/kl": [0.4, 1.0]})
    assert names_of(rows, new_health("bfloat16")) == []
    assert {name for _, name in names_of(rows)} == {"ratio_not_one", "sampler_gap", "kl_not_zero"}
    rows = sequence(2, {"policy/sampler_gap_mean": [0.049, 0.051]})
    assert names_of(rows, new_health("bfloat16")) == [(2, "sampler_gap")]


@pytest.mark.parametrize("kl", [0.0051, -0.0051, 2.0])
def test_a_first_kl_that_is_not_zero_stops(kl):
    rows = sequence(3, {"objective/kl": [kl, 2.0]})
    assert [(i, f.name, f.severity) for i, f in findings_of(rows)] == [(1, "kl_not_zero", "stop")]
    assert names_of(rows, new_health(ref_policy=CONFIG.policy)) == []
    assert names_of(sequence(3, {"objective/kl": [0.0049, 2.0]})) == []


@pytest.mark.parametrize("key", MUST_BE_FINITE)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_stops_the_run_and_is_named(key, value):
    rows = sequence(3, {key: [0.0, value, 0.0]})
    stops = [(i, f) for i, f in findings_of(rows) if f.severity == "stop"]
    assert [(i, f.name) for i, f in stops] == [(2, "not_finite")]
    assert f"{key} is {value}" in stops[0][1].message


# ------------------------------------------------------------------------------------------------- warnings


# Name, what differs from a steady run at x, an x beyond the limit and one just before it, and the iteration of the
# first warning. There must be no other finding. A list whose last value is harmless is far beyond: it is reported
# immediately.
LIMITS = [
    ("kl_negative", lambda x: {"objective/kl": [0.0, 0.0, x, 0.1]}, -1.01, -0.99, 3),
    ("kl_negative", lambda x: {"objective/kl": [0.0, x]}, -0.06, -0.049, 6),
    ("sampler_gap", lambda x: {"policy/sampler_gap": [0.0, x]}, 0.011, 0.0099, 2),
    ("sampler_gap", lambda x: {"policy/sampler_gap_mean": [0.0, x, 0.0]}, 1.1e-4, 0.9e-4, 2),
    ("skipped", lambda x: {"policy/skipped_steps": [0.0, x]}, 1.0, 0.0, 2),
    ("approx_kl", lambda x: {"policy/approx_kl": [0.001, x]}, 0.11, 0.099, 4),
    ("approx_kl", lambda x: {"policy/approx_kl": [0.001, x, 0.001]}, 1.01, 0.99, 2),
    ("approx_kl", lambda x: {"policy/approx_kl": [0.001, x, 0.001]}, math.inf, 0.99, 2),
    ("clip_fraction", lambda x: {"policy/clip_fraction": [0.001, x]}, 0.31, 0.299, 4),
    ("clip_fraction", lambda x: {"policy/clip_fraction": [0.001, x, 0.001]}, 0.81, 0.79, 2),
    ("entropy_collapse", lambda x: {"policy/entropy": [2.0, 2.0, 2.0, x]}, 0.39, 0.41, 6),
    ("entropy_collapse", lambda x: {"policy/entropy": [2.0, 2.0, 2.0, 2.0, x, 2.0]}, 0.039, 0.041, 5),
    ("alike", lambda x: {"response/distinct_2": [0.5, 0.5, 0.5, x]}, 0.19, 0.21, 6),
    ("alike", lambda x: {"response/duplicate_fraction": [0.0, 0.0, 0.0, x]}, 0.51, 0.49, 6),
    ("alike", lambda x: {"response/duplicate_fraction": [0.6, 0.6, 0.6, x]}, 0.86, 0.84, 6),
    ("alike", lambda x: {"response/duplicate_fraction": x}, 0.96, 0.94, 3),
    ("alike", lambda x: {"response/duplicate_fraction": [0.1, 0.1, 0.1, 0.1, x, 0.1]}, 0.98, 0.97, 5),
    ("unfamiliar", lambda x: {"response/unfamiliarity": [0.1, 0.1, 0.1, x]}, 1.01, 0.99, 6),
    ("unfamiliar", lambda x: {"response/unfamiliarity": [0.6, 0.6, 0.6, x]}, 1.21, 1.19, 6),
    ("empty", lambda x: {"response/empty_fraction": [0.0, x]}, 0.26, 0.249, 4),
    ("empty", lambda x: {"response/empty_fraction": [0.0, x, 0.0]}, 0.91, 0.89, 2),
    ("truncated", lambda x: {"response/eos_fraction": [1.0, 1.0, 1.0, x]}, 0.49, 0.51, 6),
    ("truncated", lambda x: {"response/eos_fraction": [0.1, 0.1, 0.1, x]}, 0.04, 0.051, 6),
    ("truncated", lambda x: {"response/eos_fraction": [0.19, 0.19, 0.19, x]}, 0.04, 0.06, 6),
    ("truncated", lambda x: {"response/eos_fraction": [1.0, 1.0, 1.0, 1.0, x, 1.0]}, 0.0, 0.01, 5),
    ("never_ends", lambda x: {"response/eos_fraction": x}, 0.04, 0.06, 3),
    ("value_blind", lambda x: {"value/explained_variance": x}, -0.01, 0.0, 15),
    ("value_blind", lambda x: {"value/explained_variance": [0.1] * 20 + [x]}, -3.0, 0.0, 30),
    ("score_saturated", lambda x: SCORE_RISES | {"objective/score_std": [1.0, 1.0, 1.0, x]}, 0.14, 0.16, 6),
    ("score_saturated", lambda x: {"objective/score_std": x}, 0.0, 0.01, 3),
    ("kl_far", lambda x: {"objective/kl": [0.0, x, 0.0], "response/length": 16.0}, 16.1, 15.9, 2),
    ("kl_far", lambda x: {"objective/kl": [0.0, x, 0.0], "response/length": 2.0}, 10.1, 9.9, 2),
    ("kl_far", lambda x: {"policy/ref_kl": [0.01, 0.01, x, 0.01]}, 1.1, 0.99, 3),
    ("gradient_far", lambda x: {"policy/grad_norm": [0.3, 0.3, x, 0.3]}, 101.0, 99.0, 3),
    ("gradient_far", lambda x: {"policy/grad_norm": [2.0, 2.0, 2.0, x, 2.0]}, 201.0, 199.0, 4),
    ("length_explains_score", lambda x: LONGER | {"response/score_length_correlation": x}, 0.51, 0.49, 10),
    # Nine tenths of the gain by iteration 6 at a KL of 4, and 6 is passed in iteration 12; or no gain at all.
    ("kl_runaway", lambda x: RISEN | {"objective/kl": [0.0] * 3 + [4.0] * 3 + [4.5, 5, 5.5, 6, 6.5, x]}, 7.0, 5.4, 12),
    ("kl_runaway", lambda x: {"objective/kl": [0.0, 0.0, 0.0, x]}, 5.1, 4.9, 6),
    # The KL costs 0.2 and the score stays; or the policy did not move.
    ("objective_falls", lambda x: FALLEN | {"objective/kl": lambda i: 0.0 if i <= 10 else x}, 2.0, 0.49, 20),
    # Of a possible gain of 2 the score has nothing, or 0.6.
    ("objective_falls", lambda x: FALLING | {"objective/score": lambda i: 0.0 if i <= 10 else x}, 0.0, 0.6, 20),
]
LONGER = {"objective/score": lambda i: 0.1 * i, "response/length": lambda i: 20.0 + i}
SCORE_RISES = {"objective/score": [0.0] * 3 + [2.0]}
RISEN = {"objective/score": [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.1]}
FALLEN = {
    "objective/reward": lambda i: 0.5 if i <= 10 else 0.3,
    "objective/score": lambda i: 1 + 0.01 * (i % 2),
}
FALLING = {
    "objective/reward": lambda i: 0.5 + 0.2 * (i % 2) - (0.0 if i <= 10 else 0.06),
    "objective/kl": lambda i: 0.0 if i <= 10 else 2.0,
}
BAD = [
    *((name, columns(bad), first) for name, columns, bad, _, first in LIMITS),
    # The score rises by the half of what the KL costs.
    (
        "objective_falls",
        {
            "objective/reward": lambda i: 0.0 if i <= 10 else -0.4,
            "objective/kl": lambda i: 0.0 if i <= 10 else 4.0,
            "objective/kl_coef": 0.3,
            "objective/score": lambda i: (0.0 if i <= 10 else 0.8) + 0.01 * (i % 2),
        },
        20,
    ),
]
NEARLY_BAD = [
    *((name, columns(nearly)) for name, columns, _, nearly, _ in LIMITS),
    ("kl_negative", {"objective/kl": lambda i: 0.0 if i == 1 or i % 5 == 0 else -0.5}),
    ("value_blind", {"value/explained_variance": [-1.0] * 14 + [0.0]}),
    ("value_blind", {"value/explained_variance": lambda i: 0.001 if i % 10 == 0 else -1.0}),
    # Its spread is gone, and so is its height: broken rather than saturated.
    ("score_saturated", {"objective/score_std": [1.0] * 9 + [0.1], "objective/score": [0.0] * 3 + [2.0] * 6 + [1.79]}),
    ("length_explains_score", LONGER | {"response/score_length_correlation": 0.6, "response/length": 20.0}),
    ("length_explains_score", LONGER | {"response/score_length_correlation": 0.6, "objective/score": 1.0}),
    # As much KL, and the score pays for it.
    ("kl_runaway", {"objective/score": lambda i: math.sqrt(i - 1), "objective/kl": lambda i: 0.5 * (i - 1)}),
]


@pytest.mark.parametrize(("name", "columns", "first"), BAD)
def test_each_problem_is_found_in_time_and_alone(name, columns, first):
    assert names_of(sequence(first + REPEAT - 1, columns)) == [(first, name)]


@pytest.mark.parametrize("columns", [columns for _, columns in NEARLY_BAD])
def test_just_below_a_limit_nothing_is_found(columns):
    assert names_of(sequence(40, columns)) == []


@pytest.mark.parametrize("columns", [columns for name, columns, _ in BAD if name not in ("sampler_gap", "skipped")])
def test_single_bad_iterations_give_no_warning(columns):
    """Bad rows between good ones, never several in a row. Sampler gaps and skipped minibatches are said at once."""
    bad = sequence(60, columns)[-1]
    assert names_of([STEADY] * 3 + [bad, STEADY, bad, STEADY, STEADY] * 10) == []


def test_of_two_signs_of_a_problem_the_first_is_said():
    ((_, finding),) = findings_of([STEADY | {"policy/sampler_gap": 1.0, "policy/sampler_gap_mean": 1.0}])
    assert finding.message.startswith("policy/sampler_gap_mean: on average")


def test_without_a_value_model_its_metrics_are_ignored():
    rows = sequence(40, {"value/explained_variance": -1.0})
    assert names_of(rows, new_health(ppo__advantage_estimator="rloo")) == []


def test_every_rule_has_a_run_here():
    tested = {name for name, _, _ in BAD} | {"not_finite", "ratio_not_one", "kl_not_zero", "same_word"}
    tested |= {"limit_missed"}  # tests/rewards/test_shaping.py
    assert {rule.name for rule in (*STOPS, *WARNINGS)} == tested


def test_the_numbers_in_a_message_are_those_of_the_run():
    """The correlation between iterations, against the standard library's."""
    rng = random.Random(3)
    scores, lengths = [0.3 * i + rng.random() for i in range(10)], [20 + i + 3 * rng.random() for i in range(10)]
    columns = {"objective/score": scores, "response/length": lengths}
    ((_, finding),) = findings_of(sequence(10, columns | {"response/score_length_correlation": [0.5, 0.7] * 5}))
    early, late = scores[:5], scores[5:]
    assert f"from {statistics.mean(early):.3g} to {statistics.mean(late):.3g}" in finding.message
    assert f"by {statistics.correlation(scores, lengths):.2f} between iterations" in finding.message
    assert "by 0.60 within a batch" in finding.message


def advice_on(name, **changes):
    columns = next(columns for found, columns, _ in BAD if found == name)
    return next(f for _, f in findings_of(sequence(20, columns), new_health(**changes)) if f.name == name).advice


def test_no_advice_names_a_key_that_is_set_already():
    assert "set evaluation.gold and evaluation.every_iterations" in advice_on("kl_runaway")
    assert "or set evaluation.every_iterations" in advice_on("kl_runaway", evaluation__gold="a.py:f")
    judge = {"evaluation__gold": "a.py:f", "evaluation__every_iterations": 10}
    assert "evaluation." not in advice_on("kl_runaway", **judge)
    (_, finding), *_ = findings_of(sequence(6, {"objective/kl": [0.0] * 3 + [5.1]}), new_health(**judge))
    assert "Without a gold score" not in finding.message
    assert "raise ppo.kl_coef" in advice_on("kl_runaway", ppo__kl_controller="fixed")
    (_, free), *_ = findings_of(sequence(6, {"policy/entropy": [2.0] * 3 + [0.1], "objective/kl_coef": 0.0}))
    assert "set ppo.kl_coef above 0" in free.advice
    adaptive = advice_on("kl_runaway", ppo__kl_controller="adaptive")
    assert "lower ppo.kl_target" in adaptive
    assert "ppo.kl_coef" not in adaptive
    assert "ppo.ppo_epochs" in advice_on("skipped", ppo__ppo_epochs=2)
    assert "ppo.ppo_epochs" not in advice_on("skipped", ppo__ppo_epochs=1)
    assert "set ppo.max_approx_kl" in advice_on("approx_kl", ppo__max_approx_kl=None)
    assert "lower ppo.max_approx_kl" in advice_on("approx_kl", ppo__max_approx_kl=0.2)


@pytest.mark.parametrize(
    "changes",
    [{"ppo__whiten_rewards": True}, {"ppo__score_normalization": "running"}]
    + [{"ppo__advantage_estimator": "reinforce_pp_baseline"}],
)
def test_rewards_without_a_fixed_unit_are_not_compared(changes):
    columns = next(columns for found, columns, _ in BAD if found == "objective_falls")
    assert names_of(sequence(25, columns), new_health(**changes)) == []


def test_a_kl_in_the_loss_is_part_of_the_objective():
    columns = {"objective/reward": 0.5, "objective/kl": lambda i: 0.0 if i <= 10 else 2.0}
    assert names_of(sequence(25, columns)) == []
    assert names_of(sequence(25, columns), new_health(ppo__kl_in="loss")) == [(20, "objective_falls")]


def test_a_negative_kl_pays_only_as_a_penalty_in_the_reward():
    for place in ("reward", "loss"):
        (_, found), *_ = findings_of(sequence(3, {"objective/kl": [0.0, 0.0, -2.0]}), new_health(ppo__kl_in=place))
        assert ("pays" in found.message) is (place == "reward")


# --------------------------------------------------------------------------------------------- how often


def test_a_warning_is_repeated_only_when_it_has_become_worse():
    """By half since it was last said, and not within ten iterations. Whether it ended between does not matter."""
    assert names_of(sequence(300, {"response/empty_fraction": 0.5})) == [(3, "empty")]
    assert names_of(sequence(300, {"response/eos_fraction": 0.0})) == [(3, "never_ends")]
    shares = [0.3] * 20 + [0.44] * 20 + [0.46] * 20 + [0.0] * 20 + [0.6] * 20 + [0.7]
    assert names_of(sequence(140, {"response/empty_fraction": shares})) == [(3, "empty"), (41, "empty"), (101, "empty")]
    rises = sequence(40, {"policy/sampler_gap": lambda i: 1.1**i})
    assert names_of(rises) == [(i, "sampler_gap") for i in (1, 11, 21, 31)]
    comes_and_goes = sequence(60, {"policy/sampler_gap": [1.0, 0.0] * 30})
    assert names_of(comes_and_goes) == [(1, "sampler_gap")]


def test_a_stop_is_given_each_time():
    rows = sequence(3, {"policy/first_ratio_error": 1.0})
    assert names_of(rows) == [(1, "ratio_not_one"), (2, "ratio_not_one"), (3, "ratio_not_one")]


def test_the_line_names_new_findings_and_those_that_still_hold():
    health = new_health()
    rows = sequence(12, {"response/empty_fraction": 0.5, "policy/approx_kl": [0.0] * 8 + [1.0] * 3 + [0.0]})
    lines = [health.line(health.check(i, row), row).split(":")[0] for i, row in enumerate(rows, 1)]
    assert lines[:2] == ["healthy", "healthy"]
    assert lines[2] == "empty"
    assert lines[3] == "empty (since iteration 3)"
    assert lines[10] == "approx_kl, empty (since iteration 3)"
    assert lines[11] == "empty (since iteration 3)"


# ------------------------------------------------------------------------------------------------ words

SAID_BY_ALL = {"the": 1.0, "great": 0.83, "film": 0.3}
AT_FIRST = {"the": 0.9, "great": 0.05, "film": 0.3}


def same_word(now, distinct_2=0.25, iterations=3):
    """The findings of `iterations` with these words, after three with AT_FIRST and distinct_2 0.5, and then one."""
    health, last = new_health(), 4 + iterations
    words = {i: AT_FIRST if i < 4 or i == last else now for i in range(1, last + 1)}
    return [
        finding
        for i in words
        for finding in health.check(i, STEADY | {"response/distinct_2": 0.5 if i < 4 else distinct_2}, words[i])
    ]


def test_a_word_in_most_responses_is_named_with_its_shares():
    (finding,) = same_word(SAID_BY_ALL)
    assert (finding.name, finding.severity) == ("same_word", "warning")
    assert "83% of the responses contain the word 'great', and 5% did at the start" in finding.message
    assert "response/distinct_2 is 0.25, 50% of the 0.5" in finding.message


@pytest.mark.parametrize(
    ("now", "distinct_2", "iterations"),
    [
        (SAID_BY_ALL | {"great": 0.69}, 0.25, 3),
        (SAID_BY_ALL, 0.33, 3),
        (SAID_BY_ALL, 0.25, 2),
        ({"the": 1.0, "film": 0.69}, 0.25, 3),
        ({}, 0.25, 3),
    ],
    ids=["in too few", "the rest is varied", "too short", "common at the start", "no words"],
)
def test_other_words_give_no_finding(now, distinct_2, iterations):
    assert same_word(now, distinct_2, iterations) == []


# ------------------------------------------------------------------------------------- before the first iteration


def interval(name, value, low, high, **more):
    found = {name: value, f"{name}_low95": low, f"{name}_high95": high} | more
    return {f"eval/{key}": figure for key, figure in found.items()}


WEAK = {
    "0.470 (95 % interval 0.350 to 0.590): not above chance (0.500). Its": interval("accuracy", 0.47, 0.35, 0.59),
    "held-out accuracy 0.500: not above chance (0.500)": {"eval/accuracy": 0.5},
    "above chance (0.500), but not above choosing the longer answer (0.610)": interval(
        "accuracy", 0.7, 0.6, 0.8, length_baseline=0.61
    ),
    "not above choosing the shorter answer (0.590)": interval("accuracy", 0.55, 0.51, 0.59, length_baseline=0.41),
    "not above giving every answer the more frequent label (0.650)": interval(
        "accuracy", 0.7, 0.6, 0.8, base_rate=0.65, length_baseline=0.5
    ),
    "held-out error 1.1: above the variance of the targets, so": {"eval/mse": 1.1, "eval/target_variance": 1.0},
    "held-out error 0.9 (95 % interval 0.8 to 1): not clearly below": interval(
        "mse", 0.9, 0.8, 1.0, target_variance=1.0
    ),
    "orders 0.490 of the pairs as their targets do, chance": {
        "eval/pair_accuracy": 0.49,
        "eval/mse": 0.9,
        "eval/target_variance": 1.0,
    },
}


@pytest.mark.parametrize("words", WEAK)
def test_a_weak_reward_model_is_reported_before_the_first_iteration(words):
    health = new_health()
    (finding,) = health.check_start({"good": {"eval/accuracy": 0.9}, "other": WEAK[words], "unknown": {}})
    assert (finding.name, finding.severity) == ("weak_reward_model", "warning")
    assert finding.message.startswith("Reward model other: held-out ")
    assert words in finding.message
    # It holds for the whole run, and after an evaluation and a resumption, and is said once.
    for i in range(1, 30):
        assert health.check(i, STEADY) == []
        health.check_evaluation(i, [0.0] * 20, [0.0] * 20)
        health.load_state_dict(json.loads(json.dumps(health.state_dict())))
        assert health.line([], {}) == "weak_reward_model (from the start)"


def test_a_good_reward_model_is_not_reported():
    pairs = {"eval/accuracy": 0.8, "eval/accuracy_low95": 0.72, "eval/length_baseline": 0.7}
    scores = {"eval/mse": 0.5, "eval/mse_high95": 0.9, "eval/target_variance": 1.0, "eval/pair_accuracy": 0.7}
    labels = {"eval/accuracy": 0.8, "eval/accuracy_low95": 0.7, "eval/base_rate": 0.6, "eval/length_baseline": 0.9}
    figures = {"pairs": pairs, "scores": scores, "labels": labels, "classifier": {}}
    assert new_health().check_start(figures) == []


# ------------------------------------------------------------------------------------------ evaluations


def evaluation(rng, score, gold, n=64):
    return [rng.gauss(score, 0.5) for _ in range(n)], [rng.gauss(gold, 0.5) for _ in range(n)]


def test_overoptimisation_names_the_best_evaluation_and_stays_on_the_line():
    rng = random.Random(1)
    course = [(0.0, 2.0), (1.0, 3.5), (1.6, 3.8), (2.1, 3.0), (2.3, 2.0)]
    health = new_health()
    findings = []
    for k, (score, gold) in enumerate(course):
        values = evaluation(rng, score, gold)
        findings += [(10 * k, f) for f in health.check_evaluation(10 * k, *values)]
        if k == 2:
            best = values
        if k == 3:
            now = values
    assert [(i, f.name, f.severity) for i, f in findings] == [
        (30, "overoptimisation", "warning"),
        (40, "overoptimisation", "warning"),
    ]
    assert health.check(41, GOOD[-1]) == []
    assert health.line([], GOOD[-1]).startswith("overoptimisation (since iteration 30): ")
    message = findings[0][1].message
    assert "its best, at iteration 20 " in message
    for column, error in zip((0, 1), ("rose", "fell"), strict=True):
        difference = [a - b for a, b in zip(now[column], best[column], strict=True)]
        standard_error = statistics.stdev(difference) / math.sqrt(len(difference))
        assert f"({statistics.mean(difference):+.2g}, standard error {standard_error:.2g})" in message, error
    assert health.check_evaluation(50, *evaluation(rng, 2.0, 4.5)) == []
    assert health.line([], {}) == "healthy"


def second(first, values):
    """The names of the findings of an evaluation with these scores and golds after the first one."""
    health = new_health()
    assert health.check_evaluation(0, *first) == []
    return [finding.name for finding in health.check_evaluation(10, *values)]


def test_evaluations_are_compared_prompt_by_prompt():
    """Prompts differ by 100 and the gold of each falls by 0.1: an unpaired comparison would not see it."""
    rng = random.Random(0)
    level = [rng.gauss(0, 100) for _ in range(50)]
    scores, golds = ([x + change + rng.gauss(0, 0.1) for x in level] for change in (0.1, -0.1))
    assert second((level, level), (scores, golds)) == ["overoptimisation"]
    assert second((level[:9], level[:9]), (scores[:9], golds[:9])) == [], "of too few prompts"


@pytest.mark.parametrize(
    ("rise", "fall", "expected"),
    [(0.21, -0.31, 1), (0.19, -0.31, 0), (0.21, -0.29, 0), (-0.21, -0.31, 0), (0.21, 0.31, 0), (0.0, 0.0, 0)],
)
def test_both_standard_errors_on_both_sides(rise, fall, expected):
    """20 prompts, differences of mean m and standard error 0.1: 2 of them for the score, 3 for gold."""
    noise = [0.1 * math.sqrt(19) * sign for sign in (1, -1)] * 10
    assert statistics.stdev(noise) / math.sqrt(20) == pytest.approx(0.1)
    zero = [0.0] * 20
    assert len(second((zero, zero), ([rise + e for e in noise], [fall + e for e in noise]))) == expected


def test_a_plateau_seldom_looks_like_overoptimisation():
    """20 evaluations whose gold varies by chance while the score rises; the stated rate is 1 run in 10."""
    alarms = 0
    for run in range(60):
        rng, health = random.Random(run), new_health()
        alarms += sum(len(health.check_evaluation(k, *evaluation(rng, 0.05 * k, 0.0))) for k in range(20)) > 0
    assert alarms <= 12


def test_without_prompts_or_without_gold_nothing_is_found():
    assert new_health().check_evaluation(20, [0.0, 1.0]) == []
    assert new_health().check_evaluation(0, [], []) == []


def runaway(golds):
    """The findings of a run whose KL grows at one score from iteration 6 on; gold is measured every 5 iterations."""
    kls = [0.0, 0.0, 0.0, 4.0, 4.0, 4.0, *(4.5 + 0.5 * i for i in range(30))]
    rows = sequence(20, {"objective/score": [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.1], "objective/kl": kls})
    health, found = new_health(), []
    for i, row in enumerate(rows, 1):
        if i % 5 == 1:
            found += health.check_evaluation(i - 1, [0.0] * 20, [golds[i // 5]] * 20)
            health.load_state_dict(json.loads(json.dumps(health.state_dict())))
        found += health.check(i, row)
    return [finding for finding in found if finding.name == "kl_runaway"]


def test_the_kl_may_grow_while_gold_rises():
    assert runaway([1.0, 2.0, 3.0, 4.0]) == []
    (stays,) = runaway([1.0, 3.0, 3.0, 3.0])
    assert "Gold was 3 at iteration 5 and is 3 at iteration 10." in stays.message
    (falls,) = runaway([1.0, 3.0, 3.1, 2.9])
    assert "Gold was 3 at iteration 5 and is 2.9 at iteration 15." in falls.message


# ------------------------------------------------------------------------------------------------- SFT and RM


def test_a_held_out_loss_that_rises_is_found_only_while_the_training_loss_falls():
    falls, stays = ([(step, loss(step)) for step in range(1, 31)] for loss in (lambda i: 2 - i / 20, lambda _: 1.0))
    assert memorises([(10, 1.0), (20, 1.2), (30, 1.06)], falls) == (
        "The held-out loss is 1.06, 6% above the 1 of step 10, and the training loss fell from 1.73 to 0.725 since "
        "then (means of 10 steps). The model memorises its training rows."
    )
    assert memorises([(20, 0.0), (30, 1.0)], falls).startswith("The held-out loss is 1, above the 0 of step 20, and")
    assert memorises([(10, 1.0), (20, 1.2), (30, 1.04)], falls) is None
    assert memorises([(10, 1.0), (20, 1.2), (30, 1.3)], stays) is None
    assert memorises([(10, 1.3), (20, 1.2), (30, 1.0)], falls) is None
    assert memorises([(30, 1.0)], falls) is None
    assert memorises([(10, 1.0), (20, 1.2)], []) is None


# ----------------------------------------------------------------------------------------------- resuming


def test_a_resumed_run_gives_the_same_findings():
    """The state passes through JSON. The run has nearly every problem, and each warning several times."""
    rng = random.Random(7)
    rows = []
    for i in range(1, 61):
        row = STEADY | {
            "objective/score": 0.05 * min(i, 25) + rng.gauss(0, 0.02),
            "objective/kl": 0.0 if i == 1 else 0.3 * i,
            "objective/score_std": 1.0 if i < 20 else 0.1,
            "response/length": 20 + i + rng.random(),
            "response/score_length_correlation": 0.8,
            "policy/entropy": 2.0 / i**2,
            "policy/approx_kl": math.inf if 10 < i < 20 else 0.0,
            "response/empty_fraction": 0.5 if i % 7 > 2 else 0.0,
            "response/distinct_2": 0.4 - 0.005 * i,
            "objective/reward": -0.1 * i,
            "response/eos_fraction": 1 - i / 60,
            "value/explained_variance": -1.0 if i < 30 else 1.0,
            "policy/sampler_gap": rng.choice([0.0, 0.1]),
        }
        rows.append({key: value for key, value in row.items() if rng.random() > 0.01})
    evaluations = {i: evaluation(rng, i / 10, 3 - abs(i - 20) / 10, n=20) for i in range(10, 61, 10)}

    def course(split):
        health = new_health()
        reports = []
        for i, row in enumerate(rows, 1):
            findings = health.check(i, row, {"great": min(1.0, i / 30), "the": 0.9})
            if i in evaluations:
                findings += health.check_evaluation(i, *evaluations[i])
            reports.append((i, findings, health.line(findings, row)))
            if i == split:
                text = json.dumps(health.state_dict(), allow_nan=False)
                health = new_health()
                health.load_state_dict(json.loads(text))
        return reports

    unsplit = course(None)
    names = {f.name for _, findings, _ in unsplit for f in findings}
    assert names >= {
        "overoptimisation", "length_explains_score", "entropy_collapse", "approx_kl", "empty", "truncated",
        "value_blind", "sampler_gap", "kl_runaway", "same_word", "objective_falls",
    }  # fmt: skip
    for split in range(1, 60):
        assert course(split) == unsplit, f"split after iteration {split}"


def test_a_state_is_a_copy_and_does_not_grow_with_the_run():
    health, other = new_health(), new_health()
    for i in range(1, 41):
        health.check(i, GOOD[-1] | {"objective/kl": 0.0})
    state = health.state_dict()
    before = json.dumps(state)
    other.load_state_dict(state)
    for each in (health, other):
        for i in range(41, 401):
            each.check(i, GOOD[-1] | {"objective/kl": 0.0})
        assert len(json.dumps(each.state_dict())) < 1.05 * len(before)
        each.check(401, STEADY | {"response/empty_fraction": 1.0, "objective/score": 9.0})
        each.check_evaluation(401, [1.0] * 20, [1.0] * 20)
    assert json.dumps(state) == before


# ------------------------------------------------------------------------------------- the words and the keys


def everything():
    findings = [finding for _, columns, first in BAD for _, finding in findings_of(sequence(first, columns))]
    free = {"objective/kl_coef": 0.0}
    findings += [finding for _, columns, first in BAD for _, finding in findings_of(sequence(first, columns | free))]
    stops = {"policy/first_ratio_error": 1.0, "objective/kl": 1.0, "loss/policy": math.nan}
    findings += new_health().check(1, STEADY | stops)
    findings += new_health().check(1, {"policy/first_ratio": 2.0})
    findings += [*same_word(SAID_BY_ALL), *new_health().check_start({"a": {"eval/accuracy": 0.5}})]
    findings += [*new_health().check_start({"a": {"eval/mse": 2.0, "eval/target_variance": 1.0}})]
    findings += no_gradient({"policy/grad_norm": 0.0}, "iteration 1")
    health = new_health()
    health.check_evaluation(0, [0.0] * 20, [1.0] * 20)
    return findings + health.check_evaluation(10, [1.0] * 20, [0.0] * 20)


def keys_of(model, prefix=""):
    keys = set()
    for name, field in model.model_fields.items():
        keys.add(prefix + name)
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for part in inner:
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys |= keys_of(part, f"{prefix}{name}.")
    return keys


def test_the_config_keys_in_the_texts_exist():
    keys = keys_of(PPOConfig)
    sections = {key.split(".")[0] for key in keys if "." in key}
    named = set()
    for finding in everything():
        for word in re.findall(r"\b[a-z_]+\.[a-z_]+\b", f"{finding.message} {finding.advice}"):
            if word.split(".")[0] in sections:
                named.add(word)
    assert {"ppo.kl_coef", "optimizer.learning_rate", "rollout.max_new_tokens"} <= named
    assert sorted(named - keys) == []


def test_a_message_is_sentences_with_a_number_and_advice_is_one_line():
    for finding in everything():
        assert "\n" not in finding.message + finding.advice
        assert finding.message.endswith("."), finding
        assert re.search(r"\d", finding.message) or finding.name == "not_finite", finding
        assert finding.advice[0].isupper(), finding
        assert not finding.advice.endswith("."), finding
        assert "  " not in finding.message + finding.advice, finding


def test_the_stage_writes_every_metric_that_is_read(pipeline):
    single = {f"policy/{name}" for name in ("first_ratio_error", "first_ratio", "skipped_steps", "bad_steps")}
    rules = (ROOT / "rlhf_cli/health/ppo_rules.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:objective|response|policy|value|loss)/\w+", rules))
    assert {"objective/score", "policy/clip_fraction", "value/explained_variance"} <= named
    read = {*named, *MUST_BE_FINITE, *SHOWN.values(), *single}
    # The gaps are written where the old log-probabilities are computed again: test_ppo_models.py sees them.
    # policy/ref_kl needs kl_in: loss, response/unfamiliarity 20 held-out prompts: test_ppo_evaluation.py sees it.
    read -= {"policy/sampler_gap", "policy/sampler_gap_mean", "policy/ref_kl", "response/unfamiliarity"}
    row = read_jsonl(pipeline("llama") / "ppo" / "metrics.jsonl")[0]
    assert sorted(read - set(row)) == []
