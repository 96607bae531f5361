"""`rlhf eval`: what it measures of a finished run, and its figures against slow ones."""

import errno
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console

from rlhf_cli.algorithms.best_of_n import best_of_n, best_of_n_kl
from rlhf_cli.algorithms.statistics import correlation, kendall, pair_accuracy
from rlhf_cli.config.sft_rm import SFTModel
from rlhf_cli.data.answers import RankedIds, ScoredIds
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.data.splits import Drawn
from rlhf_cli.evaluation.agreement import ranking_figures, score_figures
from rlhf_cli.evaluation.evaluate import measure_ppo, measure_sft
from rlhf_cli.evaluation.figures import Sentences, bootstrapped, ratio_figure, show
from rlhf_cli.evaluation.preferences import (
    Pairs,
    about_probes,
    error_groups,
    groups,
    preference_figures,
    remarks,
    worst_answers,
    worst_mistakes,
)
from rlhf_cli.evaluation.replies import Arena, Replies, differences, side_figures, win_rates
from rlhf_cli.evaluation.reward_model import Scorer
from rlhf_cli.evaluation.yardstick import (
    TILT_POINTS,
    BestOfN,
    along_the_run,
    beside_the_best,
    best_of_n_report,
    tilt_curve,
    tilted,
)
from rlhf_cli.health.baselines import held_out_verdict
from rlhf_cli.models.load import load_reward_model, load_tokenizer
from rlhf_cli.report.figure import Figure, as_metrics
from rlhf_cli.report.progress import Display
from rlhf_cli.trained import run as run_module
from rlhf_cli.trained.run import Run, _seen_from, open_run
from support.formulas import close
from support.projects import refused, rlhf
from support.servers import ChatServer, completion
from support.tiny import CPU, write_jsonl

BENCH = [
    {"prompt": "late", "chosen": ["thank you"], "rejected": ["sorry", "late", "map"], "subset": subset}
    for subset in ("Focus", "Focus", "Math")
]


@pytest.fixture(scope="module")
def server():
    """A judge that prefers the longer reply."""

    def longer(call):
        a, _, rest = call.text.partition("Response A:\n")[2].partition("\n\nResponse B:\n")
        return 200, {}, completion("A" if len(a) > len(rest.partition("\n\nAnswer")[0]) else "B")

    with ChatServer(longer) as running:
        yield running


def arguments(root, server):
    """Of `rlhf eval`, with everything that it measures."""
    judge = ["--judge", server.url, "--judge-model", "longest"]
    return [root, "--samples", 4, "--rm-bench", root / "bench.jsonl", *judge]


@pytest.fixture(scope="module")
def evaluated(pipeline, server, tmp_path_factory):
    """A copy of a run after `rlhf eval` with 4 samples a prompt, a benchmark and a judge, and what it printed."""
    root = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(pipeline("llama"), root)
    write_jsonl(root / "bench.jsonl", BENCH)
    return root, rlhf("eval", *arguments(root, server)).output


@pytest.fixture(scope="module")
def arena(evaluated):
    """The held-out prompts of the run, and its trained policy."""
    run = open_run(evaluated[0], stage="ppo", device=CPU, seed=0)
    model, tokenizer = run.load(run.model_path("sft"))
    return Arena(run, run.ppo, model, tokenizer), run.load(run.model_path("ppo"))[0]


def report(root, stage):
    return json.loads((root / "eval" / stage / "evaluation.json").read_text(encoding="utf-8"))


def metrics_of(root, stage):
    return json.loads((root / stage / "manifest.json").read_text())["metrics"]


def test_the_figures_are_those_of_the_stages(evaluated):
    root, _ = evaluated
    sft, stage = report(root, "sft"), metrics_of(root, "sft")
    for name in ("loss", "perplexity", "token_accuracy"):
        figure = sft["figures"][name]
        assert figure["value"] == pytest.approx(stage[f"eval/{name}"], rel=1e-5)
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert len(sft["replies"]) == 5
    assert 0 <= sft["figures"]["eos_rate"]["value"] <= 1
    assert sft["figures"]["length"]["value"] <= 6
    assert set(sft["before"]) == set(sft["figures"]), "the model before SFT has the same figures"

    figures, stage = report(root, "rm")["figures"], metrics_of(root, "rm")
    assert figures["accuracy"]["value"] == pytest.approx(stage["eval/accuracy"])
    assert figures["margin"]["value"] == pytest.approx(stage["eval/margin"], rel=1e-4)

    found, stage = report(root, "ppo"), json.loads((root / "ppo" / "evaluation.json").read_text())
    for side in ("sft", "ppo"):
        assert found[side]["score"]["value"] == pytest.approx(stage[side]["score_mean"], abs=1e-4)
        assert found[side]["length"]["value"] == pytest.approx(stage[side]["length"])
    assert found["ppo"]["kl"]["value"] == pytest.approx(stage["ppo"]["kl"], abs=1e-4)
    assert found["difference"]["score"]["value"] == pytest.approx(
        stage["ppo"]["score_mean"] - stage["sft"]["score_mean"], abs=1e-4
    )
    assert len(found["replies"]) == stage["num_prompts"]


def test_best_of_one_is_the_mean_of_the_samples(evaluated):
    root, _ = evaluated
    rows = report(root, "ppo")["best_of_n"]["rows"]
    assert [row["n"] for row in rows] == [1, 2, 4]
    scores = [row["score"]["value"] for row in rows]
    assert scores == sorted(scores)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[0]["kl_bound"] == 0
    every = report(root, "ppo")["best_of_n"]["every_n"]
    assert [row["n"] for row in every] == [1, 2, 3, 4]
    for row in rows:
        assert every[row["n"] - 1]["score"] == pytest.approx(row["score"]["value"])


def test_an_evaluation_of_one_stage_repeats_what_it_found_among_all_and_changes_no_stage(evaluated, server):
    """The alignment tax needs the held-out rows of SFT, which `--stage ppo` does not measure."""
    root, _ = evaluated
    _, *samples, option, bench = arguments(root, server)[:5]
    of_ppo = [*samples, *arguments(root, server)[5:]]
    for stage, options in (("sft", []), ("rm", [option, bench]), ("ppo", of_ppo)):
        before = report(root, stage)
        result = rlhf("eval", root, "--stage", stage, *options)
        assert report(root, stage) == before
    assert "alignment_tax" in before
    assert "eval/sft" not in result.output
    rlhf("doctor", root)


def test_the_reward_model_is_asked_on_the_benchmark(evaluated):
    root, output = evaluated
    bench = report(root, "rm")["bench"]
    assert bench["chance"] == {"Focus": 0.25, "Math": 0.25}
    assert set(bench["figures"]) == {"Focus", "Math", "mean of subsets"}
    assert bench["shares_base"] is True
    assert bench["file"] == "bench.jsonl"
    assert "Reward model and policy come from the same model" in output
    model, tokenizer = load_reward_model(str(root / "rm" / "model")), load_tokenizer(str(root / "rm" / "model"))
    eos = tokenizer.eos_token_id
    texts = [BENCH[0]["prompt"] + answer for answer in ["thank you", *BENCH[0]["rejected"]]]
    ids = [[i for i in tokenizer(text)["input_ids"] if i != eos] for text in texts]
    scores = [model(input_ids=torch.tensor([[*row, eos]])).logits.item() for row in ids]
    assert bench["figures"]["Math"]["value"] == float(scores[0] == max(scores))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stage", "sft", "--rm-bench", "rows.jsonl"], "--rm-bench: needs the stage rm"),
        (["--stage", "rm", "--judge", "http://127.0.0.1:9", "--judge-model", "x"], "--judge: needs the stage ppo"),
        (["--rm-bench", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--seed", 2**64], "--seed: 18446744073709551616, must be less"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_before_anything_is_measured(evaluated, options, says):
    assert says in refused("eval", evaluated[0], *options)


def test_scores_of_pairs_and_of_samples_of_both_policies_are_beside_each_other(evaluated):
    root, _ = evaluated
    found = report(root, "rm")
    assert set(found["distributions"]) == {"better", "worse", "SFT", "PPO"}
    for side, row in found["distributions"].items():
        scores = torch.tensor(found["scores"][side], dtype=torch.float64)
        assert row["mean"] == pytest.approx(scores.mean().item())
        assert row["p50"] == pytest.approx(scores.quantile(0.5).item())
    assert 0 <= found["figures"]["prefix_flips"]["value"] <= 1


def test_the_judge_reads_the_replies_that_are_written(evaluated, server):
    root, _ = evaluated
    found = report(root, "ppo")
    longer = []
    for row in found["replies"]:
        sft, ppo = row["sft"]["reply"].strip(), row["ppo"]["reply"].strip()
        longer.append(0.5 if sft == ppo or len(sft) == len(ppo) else float(len(ppo) > len(sft)))
        assert row["judge"] == longer[-1]
    assert found["win_rate"]["judge"]["value"] == pytest.approx(sum(longer) / len(longer))
    assert server.requests[0]["model"] == "longest"
    assert found["judge"]["name"] == "longest"


def test_a_judge_that_cannot_be_reached_costs_no_other_figure(evaluated, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(evaluated[0], root)
    shutil.rmtree(root / "eval")
    with ChatServer(lambda _: (404, {}, b"no such model")) as gone:
        options = ["--stage", "ppo", "--samples", 0, "--judge", gone.url, "--judge-model", "x", "--quiet"]
        result = rlhf("eval", root, *options, code=1)
    assert "error: --judge: " in result.output
    assert "Check that --judge is the base URL" in result.output
    assert "score" in report(root, "ppo")["win_rate"]


def test_the_models_before_have_the_revision_of_the_config(evaluated, monkeypatch):
    run, loaded = open_run(evaluated[0], stage=None, device=CPU, seed=0), []
    run = replace(
        run,
        sft=run.sft.model_copy(update={"model": run.sft.model.model_copy(update={"revision": "v1"})}),
        ppo=run.ppo.model_copy(update={"policy": run.ppo.policy.model_copy(update={"revision": "v2"})}),
    )

    def loads(real):
        def load(path, revision, *more):
            loaded.append(revision)
            return real(path, None, *more)

        return load

    for name in ("frozen_policy", "load_tokenizer"):
        monkeypatch.setattr(run_module, name, loads(getattr(run_module, name)))
    display = Display("eval", quiet=True)
    measure_sft(run, display)
    measure_ppo(run, 0, 1, display)
    assert (loaded.count("v1"), loaded.count("v2")) == (2, 2), "weights and tokenizer"


def test_a_model_before_without_embeddings_for_new_tokens_is_not_compared(run_stage, make_model, tmp_path):
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"prompt": "the tent", "response": f" <note> lamp {i}"} for i in range(9)]
    )
    data = {"train": str(path), "test": {"path": str(path), "limit": 3}, "special_tokens": "keep"}
    run_stage("sft", tmp_path, model={"path": str(make_model("llama")), "add_tokens": ["<note>"]}, data=data)
    assert "lacks embeddings for model.add_tokens" in rlhf("eval", tmp_path).output
    assert "before" not in report(tmp_path, "sft")


def test_a_full_disk_is_one_line_and_keeps_the_file_before_it(evaluated, monkeypatch):
    root, _ = evaluated
    file = root / "eval/sft/evaluation.json"
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    says = rlhf("eval", root, "--stage", "sft", "--seed", 7, "--quiet", code=2).output
    assert f"{file}: cannot be written (No space left on device)" in says
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"), [(["nowhere"], "no such directory"), ([".", "--stage", "rm"], "no stage is finished")]
)
def test_a_run_without_the_stage_gets_one_line(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused("eval", *arguments)


# ----------------------------------------------------------------------------------------- the figures


def pairs(better, worse, lengths, columns=None):
    rows = [
        RankedIds(
            [[0] * a, [0] * b],
            Record(
                "p", f"f:{i}", (Answer("good"), Answer("bad")), ranked=True, columns=(columns or [{}] * len(better))[i]
            ),
        )
        for i, (a, b) in enumerate(lengths)
    ]
    return Pairs(rows, torch.tensor(better), torch.tensor(worse))


def test_a_model_that_reads_only_length_is_found_out():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (400, 2), generator=generator).tolist()
    found = pairs([a / 10 for a, _ in lengths], [b / 10 for _, b in lengths], lengths)
    figures = preference_figures(found, seed=0)
    assert figures["score_length_correlation"].value == pytest.approx(1, abs=1e-5)
    assert figures["accuracy"].value == figures["longer_wins"].value
    assert figures["accuracy_longer_is_worse"].value == 0
    assert abs(figures["length_controlled"].value - 0.5) < 0.1
    assert "not above chance (0.500)" in held_out_verdict(as_metrics(figures))[0]


def test_a_rate_of_one_has_an_interval():
    before, after = replies([[0.0]] * 64, gold=[[1.0]] * 64), replies([[0.5]] * 64, gold=[[1.0]] * 64)
    figures = side_figures(after, seed=0)
    for name in ("eos_rate", "gold"):
        assert figures[name].value == 1
        assert figures[name].low == pytest.approx(0.943, abs=1e-3)
    changes = differences(before, after, seed=0)
    for name in ("eos_rate", "gold"):
        assert changes[name].low < 0 < changes[name].high
    assert changes["score"].low == changes["score"].high == 0.5


def test_the_two_answers_of_a_pair_are_resampled_together():
    """Each pair is a point of its own on a line, both answers in one place: 30 independent places and not 60."""
    generator = torch.Generator().manual_seed(0)
    score, place = torch.randn(2, 30, generator=generator)
    lengths = [(round(100 + 20 * x), round(100 + 20 * x)) for x in place.tolist()]
    found = pairs(score.tolist(), score.tolist(), lengths)
    figure = preference_figures(found, seed=0)["score_length_correlation"]
    once = bootstrapped(correlation, score, torch.tensor([float(a) for a, _ in lengths]), seed=0)
    assert figure.value == pytest.approx(once.value)
    assert (figure.low, figure.high) == pytest.approx((once.low, once.high))


def test_agreement_with_gold_scores_counts_no_ties():
    columns = [{"gold_chosen": 2.0, "gold_rejected": other} for other in (1.0, 3.0, 2.0, 1.0)]
    figures = preference_figures(pairs([1.0, 1.0, 1.0, -1.0], [0.0] * 4, [(5, 5)] * 4, columns), seed=0)
    assert figures["gold_accuracy"].value == pytest.approx(1 / 3)
    assert figures["gold_accuracy"].rows == 3
    assert "eval/gold_accuracy" not in ranking_figures(torch.ones(2), [2], [0.0], [0.0])
    for missing in (math.nan, 10**400):
        columns[0]["gold_rejected"] = missing
        found = pairs([1.0, 1.0, 1.0, -1.0], [0.0] * 4, [(5, 5)] * 4, columns)
        assert "gold_accuracy" not in preference_figures(found, seed=0)


def test_probes_that_are_not_above_chance_are_named():
    figures = {"rude": Figure(0.99, 0.95, 1.0, 100), "vague": Figure(0.55, 0.45, 0.64, 100)}
    assert "1 of 2 probes" in (text := about_probes(figures))
    assert "vague 0.55 [0.45, 0.64]" in text
    assert "rude" not in text
    assert about_probes({"rude": figures["rude"]}) == "accuracy is above chance (0.50) in every probe"


def test_a_row_of_a_table_has_the_same_digits_in_every_column():
    out = io.StringIO()
    columns = {
        "SFT": {"rude": Figure(0.32, 0.26, 0.38)},
        "PPO": {"rude": Figure(0.0078, 0.0, 0.0196)},
        "chance": {"rude": Figure(0.5)},
    }
    show(Display("eval", quiet=False, console=Console(file=out, width=200)), "T", columns)
    text = out.getvalue()
    for part in ("0.320 [0.260, 0.380]", "0.008 [0.000, 0.020]", "0.500"):
        assert part in text


def test_the_shorter_rule_is_the_baseline_where_it_wins():
    lengths = [(3, 9)] * 60 + [(9, 3)] * 40
    better = [1.0] * 55 + [0.0] * 45
    figures = preference_figures(pairs(better, [0.5] * 100, lengths), seed=0)
    assert figures["shorter_wins"].value == 0.6
    assert "not above chance (0.500) or choosing the shorter answer (0.600)" in held_out_verdict(as_metrics(figures))[0]


def test_where_every_pair_is_right_no_temperature_is_advised():
    figures = preference_figures(pairs([2.0] * 9, [0.0] * 9, [(5, 5)] * 9), seed=0)
    assert "every pair is right, so no confidence is too high" in remarks(figures)[0]


def test_groups_and_worst_mistakes_name_their_rows():
    columns = [{"subset": "math"}] * 3 + [{"subset": "chat"}]
    found = pairs([1.0, 2.0, -5.0, -1.0], [0.0, 0.0, 1.0, 0.0], [(5, 5)] * 4, columns)
    tables = groups(found, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert tables["subset"]["math"].value == pytest.approx(2 / 3)
    assert tables["subset"]["chat"].value == 0
    assert found.longer_wins.tolist() == [0.5] * 4
    worst = worst_mistakes(found)
    assert [row["where"] for row in worst] == ["f:2", "f:3"]
    assert worst[0]["better_score"] - worst[0]["worse_score"] == -6


def test_errors_of_scored_answers_by_quarter_and_the_worst_of_them():
    target = torch.arange(16.0)
    stated, length = target + torch.tensor([0.0] * 12 + [2.0] * 3 + [-5.0]), target.flip(0)
    error = (stated - target).abs()
    tables = error_groups(error, target, length, seed=0)
    assert tables["true score"]["largest quarter"].value == pytest.approx(11 / 4)
    assert tables["length of the answer"]["smallest quarter"].value == pytest.approx(11 / 4)
    assert tables["true score"]["smallest quarter"].value == 0
    rows = [ScoredIds([0], x, Record("p", f"f:{x:.0f}", (Answer("r", x),))) for x in target.tolist()]
    worst = worst_answers(rows, stated, target)
    assert worst[0] == {"where": "f:15", "prompt": "p", "response": "r", "stated": 10.0, "target": 15.0}
    assert len(worst) == 16
    assert error_groups(error[:3], target[:3], length[:3], seed=0) == {}


def test_a_ratio_weighs_rows_by_their_tokens_and_infinity_is_left_out_of_json():
    figure = ratio_figure(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 3.0]), seed=0)
    assert (figure.value, figure.rows) == (2.5, 2)
    assert Figure(math.inf, rows=3).as_json() == {"rows": 3}


def replies(score, gold=None, length=None):
    score = torch.tensor(score, dtype=torch.float64)
    rows, columns = score.shape
    zero = torch.zeros_like(score)
    return Replies(
        texts=[["w"] * columns] * rows,
        ids=[[[0]] * columns] * rows,
        score=score,
        each={"rm": score},
        gold={} if gold is None else {"gold": torch.tensor(gold, dtype=torch.float64)},
        logprob=zero - 30,
        kl=zero,
        token_kl=[[[0.0]] * columns] * rows,
        length=zero + 1 if length is None else torch.tensor(length, dtype=torch.float64),
        ended=zero + 1,
    )


def test_the_samples_needed_for_a_score_and_gold_there():
    best = BestOfN(replies([[0.0, 1.0, 2.0, 3.0]] * 3, gold=[[0.0, 2.0, 4.0, 6.0]] * 3))
    assert [best.needed(score) for score in (1.5, 1.51, 3.0, 3.01)] == [1, 2, 4, None]
    assert best.gold_at(1.8) == pytest.approx(3.6), "twice the score, interpolated"
    assert BestOfN(replies([[0.0, 1.0]])).gold_at(0.6) is None
    generator = torch.Generator().manual_seed(0)
    samples = replies(torch.randn(60, 16, generator=generator).tolist())
    own = best_of_n(samples.score, 4)[0] + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64)
    low, high = BestOfN(samples).needed_interval(own, seed=0)
    assert 1 < low <= 4 <= high < 16
    assert BestOfN(samples).needed_interval(own + 9, seed=0) == (17, 17)


def test_figures_of_scored_answers_and_the_orders_of_resampled_rows():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(40, generator=generator, dtype=torch.float64).round(decimals=1)
    predicted = (target + torch.randn(40, generator=generator, dtype=torch.float64)).round(decimals=1)
    figures = score_figures(predicted, target, seed=0)
    for name, function in (("kendall", kendall), ("pair_accuracy", pair_accuracy)):
        drawn = torch.randint(40, (300, 40), generator=generator)
        values = torch.stack([function(predicted[rows], target[rows]) for rows in drawn]).sort().values
        assert figures[name].low == pytest.approx(values[7].item(), abs=0.06)
        assert figures[name].high == pytest.approx(values[292].item(), abs=0.06)
    assert figures["mse"].value == pytest.approx((predicted - target).square().mean().item())
    assert figures["target_variance"].value == pytest.approx(target.var(correction=0).item())
    assert figures["pearson"].value == pytest.approx(torch.corrcoef(torch.stack([predicted, target]))[0, 1].item())


def test_the_tilt_has_the_kl_that_was_asked_for_and_the_best_score_there():
    generator = torch.Generator().manual_seed(0)
    samples = replies(torch.randn(50, 64, generator=generator).tolist(), gold=torch.zeros(50, 64).tolist())
    found = tilted(samples, 1.5)
    score, figures = found
    # Of a normal distribution: the tilt by mu has KL mu^2 / 2 and mean mu.
    assert score.mean() == pytest.approx(math.sqrt(3), abs=0.1)
    assert figures["gold"] == 0
    rows = BestOfN(samples).rows(seed=0)
    assert score.mean() > max(row["score"].value for row in rows if row["kl_bound"] <= 1.5)
    assert tilted(samples, 9.0) is None
    scores = [point["score"] for point in tilt_curve(BestOfN(samples), 2.0)]
    assert scores == sorted(scores)


def test_a_tilt_below_best_of_n_is_no_yardstick():
    """64 samples express at most 4.16 nats: at 3.1 the tilt's estimate is below best-of-59 of the same samples."""
    generator = torch.Generator().manual_seed(0)
    samples = replies(torch.randn(128, 64, generator=generator).tolist())
    ppo = replies([[2.0 + 0.1 * (i % 3)] for i in range(128)])
    sentences = Sentences(Display("eval", quiet=True))
    for kl, name in ((3.1, "best_of_n"), (0.7, "tilt")):
        found = beside_the_best(BestOfN(samples), ppo.score[:, 0], kl, sentences, seed=0)
        same = BestOfN(samples).beside(replace(ppo, kl=torch.full((128, 1), kl)), seed=0)
        best = same[1]["best_of_n"]["score"].value
        assert found["yardstick"]["policy"] == name
        assert found["yardstick"]["score"] == pytest.approx(max(best, found["tilt"]["score"]))
        share = found["yardstick"]["share"]
        assert share["low"] < share["value"] < share["high"]
        start = samples.score.mean().item()
        assert share["value"] == pytest.approx((2.1 - start) / (found["yardstick"]["score"] - start), rel=0.01)
    too_few, best_of_n_says, tilt_says = sentences.texts
    assert "64 samples a prompt are too few to estimate what the best policy gains" in too_few
    assert "The best possible is higher" in best_of_n_says
    assert "about the best possible at PPO's KL" in tilt_says
    assert f"PPO has {100 * share['value']:.0f} % [" in tilt_says
    curve = tilt_curve(BestOfN(samples), 3.1)
    assert 5 < len(curve) < TILT_POINTS
    for point in curve:
        assert point["score"] >= BestOfN(samples).score_at(point["kl"]).mean().item()


def test_the_table_of_best_of_n_has_the_estimated_kl_and_its_bound():
    """Of two equally likely replies: log(3/2) * 3/4 - 1/8, and log(2) - 1/2."""
    samples = replace(replies([[0.0, 1.0]] * 3), logprob=torch.full((3, 2), -math.log(2), dtype=torch.float64))
    prompts = [Record("p", f"f:{i}") for i in range(3)]
    arena = SimpleNamespace(prompts=prompts, reference=None, replies=lambda *_: samples)
    out = io.StringIO()
    sentences = Sentences(Display("eval", quiet=False, console=Console(file=out, width=200)))
    found = best_of_n_report(arena, replies([[0.5]] * 3), 2, 3, sentences, seed=0)
    assert found["ppo"] == {"score": 0.5, "kl": 0.0}
    _, row = found["rows"]
    assert (row["kl"], row["kl_bound"]) == pytest.approx((0.179099, 0.193147), abs=1e-6)
    (line,) = [line.split() for line in out.getvalue().splitlines() if line.startswith("best of 2 ")]
    assert line[-2:] == ["0.18", "0.19"]
    assert re.search("KL +KL at most", out.getvalue())


def test_a_policy_that_did_not_move_or_could_gain_nothing_has_no_yardstick():
    """Its share of a gain of 0 would be infinite, and a KL of -0.0 is not beyond the samples but below them."""
    scores = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).tolist()
    sentences, ppo = Sentences(Display("eval", quiet=True)), replies([[0.5]] * 8)
    cases = (scores, -1e-9, "KL of 0.0 nats is not"), (scores, -0.8, "KL of -0.8 nats"), ([[1.0] * 16] * 8, 0.3, "same")
    for samples, kl, says in cases:
        assert beside_the_best(BestOfN(replies(samples)), ppo.score[:, 0], kl, sentences, seed=0) == {}
        assert says in sentences.texts[-1]
    assert not any(sign in text for text in sentences.texts for sign in ("-0.0", "inf", "%"))


def test_a_run_is_evaluated_from_any_folder(evaluated, tmp_path, monkeypatch):
    """Relative paths in its configs begin where it was started; hub ids stay."""
    root, _ = evaluated
    home = tmp_path / "home"
    shutil.copytree(root, home / "runs" / "a")
    (home / "data").mkdir()
    (home / "judge.py").write_text("def judge(prompts, responses, rows):\n    return [1.0 for _ in rows]\n")
    for path in (home / "runs/a").glob("*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        config["artifacts"] = "runs/a"
        for sources in config["data"].values():
            for source in sources if isinstance(sources, list) else []:
                source["path"] = f"data/{Path(shutil.copy(source['path'], home / 'data')).name}"
        if path.parent.name == "ppo":
            config["evaluation"]["gold"] = "judge.py:judge"
        if path.parent.name == "sft":
            config["model"]["path"] = shutil.copytree(config["model"]["path"], home / "base").name
        path.write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    run = open_run(Path("home/runs/a"), stage=None, device=CPU, seed=0)
    assert run.ppo.evaluation.gold == f"{home}/judge.py:judge"
    assert run.sft.model.path == f"{home}/base"
    assert _seen_from(home, SFTModel(path="organisation/model")).path == "organisation/model"
    assert run.ppo.data.test[0].path.startswith(f"{home}/data/")
    rlhf("eval", home / "runs/a", "--samples", 0)


def test_ppo_beside_best_of_n_at_the_same_kl():
    """The truth is known: scores are uniform, the samples equally likely, PPO is best-of-3 minus a tenth."""
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(400, 16, generator=generator, dtype=torch.float64)
    samples = replies(score.tolist(), gold=(2 * score).tolist())
    (expected,) = best_of_n(samples.score, 3)
    noise = 0.2 * torch.randn(400, generator=generator, dtype=torch.float64)
    ppo = replies((expected - 0.1 + noise)[:, None].tolist(), gold=(2 * expected)[:, None].tolist())
    (_, kl) = best_of_n(samples.score, 3, best_of_n_kl(samples.logprob, 3))
    found = BestOfN(samples).beside(replace(ppo, kl=kl[:, None]), seed=0)
    n, sides = found
    assert n == pytest.approx(3)
    assert sides["best_of_n"]["score"].value == pytest.approx(expected.mean().item())
    assert sides["difference"]["score"].value == pytest.approx(-0.1, abs=0.03)
    assert sides["difference"]["score"].low < -0.1 < sides["difference"]["score"].high < -0.05
    assert sides["difference"]["gold"].value == pytest.approx(0, abs=1e-12)
    assert BestOfN(samples).beside(replace(ppo, kl=kl[:, None] + 9), seed=0) is None


def test_the_figures_along_a_run_and_where_on_the_curve_it_ended(tmp_path):
    def gold(kl):
        d = math.sqrt(kl)
        return 2.0 + (d * (2.0 - 1.2 * math.log(d)) if d else 0.0)

    (tmp_path / "ppo").mkdir()
    rows = [{"step": i, "score_mean": float(i), "kl": i / 3, "gold": gold(i / 3)} for i in range(1, 30)]
    write_jsonl(tmp_path / "ppo" / "evaluations.jsonl", rows)
    start = {"score_mean": 0.0, "kl": 0.0, "gold": 2.0}
    (tmp_path / "ppo" / "evaluation.json").write_text(json.dumps({"sft": start}), encoding="utf-8")
    out = io.StringIO()
    sentences = Sentences(Display("eval", quiet=False, console=Console(file=out, width=200)))
    run = Run(tmp_path, CPU, 0, None, None, None)
    found = along_the_run(run, "gold", sentences)
    assert len(found["along"]) == 30
    assert found["along"][-1] == {"step": 29, "score": 29.0, "kl": 29 / 3, "gold": pytest.approx(gold(29 / 3))}
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["0", "0.000", "0.000", "2.000"] in lines
    assert ["29", "29.000"] in [line[:2] for line in lines]
    # The peak is at exp(2 / 1.2 - 1) = 1.95, and the run ended at sqrt(29 / 3).
    assert "It peaks at d = 1.95 (KL 3.8); the run ended at d = 3.11, behind the peak" in sentences.texts[0]
    write_jsonl(tmp_path / "ppo" / "evaluations.jsonl", [{"step": 0, **start}, *rows])
    assert along_the_run(run, "gold", Sentences(Display("eval", quiet=True)))["along"] == found["along"]
    renamed = along_the_run(run, "craft", Sentences(Display("eval", quiet=True)))
    assert [row.keys() for row in renamed["along"]] == [{"step", "score", "kl"}] * 30
    write_jsonl(tmp_path / "ppo" / "evaluations.jsonl", rows[:8])
    along_the_run(run, "gold", sentences)
    assert "before the peak: gold was still rising" in sentences.texts[1]
    (tmp_path / "ppo" / "evaluations.jsonl").unlink()
    assert along_the_run(run, "gold", sentences) == {}
    assert "Without evaluation.every_iterations in ppo.yaml" in sentences.texts[2]


def test_win_rates_count_ties_and_control_length():
    before, after = replies([[0.0]] * 4), replies([[1.0], [0.0], [1.0], [-1.0]], length=[[9.0], [9.0], [9.0], [1.0]])
    rates = win_rates(before, after)
    assert rates["score"].value == 0.625
    assert rates["score_equal_length"].value < 0.625


def test_replies_and_their_kl_against_one_sequence_at_a_time(arena):
    arena, trained = arena
    found = arena.replies(trained, 2)
    for p, prompt in enumerate(arena.prompts[:3]):
        for k in range(2):
            ids = torch.tensor([prompt.ids + found.ids[p][k]])
            sums = []
            for model in (trained, arena.reference):
                logits = model(input_ids=ids).logits[0, :-1] / arena.config.rollout.temperature
                chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                sums.append(chosen[len(prompt.ids) - 1 :].sum())
            close(found.logprob[p, k], sums[0].double(), 1e-3)
            close(found.kl[p, k], (sums[0] - sums[1]).double(), 1e-3)


def test_replies_repeat_whatever_their_number_and_some_of_them_are_those_of_some_prompts(arena):
    """Best-of-n on fewer prompts compares them with PPO's replies to the same ones."""
    arena, _ = arena
    one, three = arena.replies(arena.reference, 1), arena.replies(arena.reference, 3)
    assert [row[0] for row in one.texts] == [row[0] for row in three.texts]
    assert [row[0] for row in three.texts] != [row[1] for row in three.texts]
    some = three.of([2, 0])
    assert some.texts == [three.texts[2], three.texts[0]]
    assert some.score.tolist() == [three.score[2].tolist(), three.score[0].tolist()]
    assert some.each.keys() == three.each.keys()


def test_eval_measures_the_rows_that_the_stages_draw(evaluated, tmp_path):
    """`evaluation.max_rows` and `num_prompts` cut to the rows of the seed, not to the first ones."""
    root = tmp_path / "run"
    shutil.copytree(evaluated[0], root)
    for stage, key, number in (("sft", "max_rows", 3), ("rm", "max_rows", 3), ("ppo", "num_prompts", 3)):
        path = root / stage / "config.yaml"
        config = yaml.safe_load(path.read_text())
        config["evaluation"][key] = number
        path.write_text(yaml.safe_dump(config))
    cut, whole = (open_run(one, stage=None, device=CPU, seed=4) for one in (root, evaluated[0]))
    drawn = []
    for run in (cut, whole):
        model, tokenizer = run.load(run.model_path("sft"))
        scorer = Scorer(run, run.rm, load_reward_model(run.model_path("rm")), tokenizer)
        prompts = Arena(run, run.ppo, model, tokenizer).prompts
        drawn.append((run.demonstrations(model, tokenizer), scorer.held_out_rows(), prompts))
    for some, every in zip(*drawn, strict=True):
        assert str(some) == f"3 of {len(every)}"
        assert some == Drawn(every, 3, seed=4)
        assert some != every[:3]
