"""The reward model of a run on held-out rows, on a benchmark, and on samples of the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.calibration import reliability
from rlhf_cli.algorithms.statistics import correlation
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.answers import AnswerEncoder, RankedIds, ScoredIds, ScoreEncoder, answer_encoder, labelled_pairs
from rlhf_cli.data.cache import Tokenised, tokenise
from rlhf_cli.data.splits import Drawn, held_out_rows
from rlhf_cli.data.stage_rows import StageRows, probe_rows, rm_rows
from rlhf_cli.evaluation import preferences
from rlhf_cli.evaluation.agreement import (
    figures_of_rankings,
    label_figures,
    probe_shares,
    score_figures,
    scores_of_rows,
)
from rlhf_cli.evaluation.benchmark import BenchRow, bench_figures, encode_bench, is_joined, num_unpaired, shares_base
from rlhf_cli.evaluation.figures import Sentences, as_json, bootstrapped, share_figure, show
from rlhf_cli.evaluation.normalization import fit_length, scale_of, texts_of
from rlhf_cli.health.baselines import held_out_verdict
from rlhf_cli.models.forward import longest_input
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import load_reward_model, load_tokenizer, prepare
from rlhf_cli.processes.distributed import World
from rlhf_cli.report.figure import Figure, as_metrics
from rlhf_cli.report.progress import Display
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.trained.run import Run

SAMPLED_ROWS = 128  # held-out prompts that the policies answer for the distributions of scores
PERCENTILES = (10, 50, 90)
PROBES = "probe (data.probes)"  # the group of the accuracies by probe


class Scorer:
    """The reward model of a run on its device, ready to score."""

    def __init__(self, run: Run, config: RMConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        prepare(model, run.device)
        self.run, self.config, self.model, self.tokenizer = run, config, model, tokenizer
        self.encoder = self.encoder_of(rm_rows(config))
        self.budget = run.budget(model, config.precision)

    def encoder_of(self, rows: StageRows) -> AnswerEncoder[Any]:
        return answer_encoder(self.tokenizer, rows, reads_last_token=reads_last_token(self.model))

    def tokenised(self, encoder: AnswerEncoder[Any]) -> Tokenised[Any]:
        return tokenise(encoder, longest=longest_input(self.model, self.tokenizer))

    def held_out_rows(self) -> Drawn[Any]:
        """The held-out rankings, pairs of labelled texts, or scored answers, as the stage evaluated them."""
        found, config = self.tokenised(self.encoder), self.config
        if config.is_pairwise and isinstance(self.encoder, ScoreEncoder):  # a higher and a lower label, as in training
            found = labelled_pairs(found, config.seed)
        return held_out_rows(found, config.data, config.evaluation.max_rows, self.run.seed).test

    def score(self, rows: list[list[list[int]]], lengths: list[list[int]]) -> Tensor:
        """Scores of the sequences of all rows, row by row, not normalised. `lengths` are the `reply_length` of each."""
        world = World(0, 1, self.run.device)
        return scores_of_rows(self.model, rows, self.budget, self.config.precision, world, lengths)

    def score_items(self, items: Sequence[RankedIds] | Sequence[ScoredIds]) -> Tensor:
        """The scores of all answers of all rows."""
        return self.score([item.sequences for item in items], [item.lengths for item in items])

    def score_ends(self, rows: Sequence[RankedIds]) -> Tensor:
        """The scores of the best and the worst answer of all rows."""
        ends = [[row.answers[0], row.answers[-1]] for row in rows]
        return self.score(ends, [[row.lengths[0], row.lengths[-1]] for row in rows])


def measure_reward_model(run: Run, bench: tuple[str, list[BenchRow]] | None, display: Display) -> dict[str, Any]:
    """Print and return the figures of the `rm` stage; {} without rows. `bench` is the name of a file and its rows."""
    config = run.rm
    assert config is not None
    path = run.model_path("rm")
    scorer = Scorer(run, config, load_reward_model(path), load_tokenizer(path))
    rows, sentences = scorer.held_out_rows(), Sentences(display)
    report: dict[str, Any] = {}
    if rows:
        report = (_of_pairs if config.is_pairwise else _of_scores)(scorer, rows, sentences)
    else:
        display.warn("rm: no held-out rows, so no figures. Set data.test or data.test_fraction and train again")
    if bench is not None:
        report["bench"] = _of_benchmark(scorer, *bench, sentences)
    return report | {"sentences": sentences.texts} if report else {}


def measure_again(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Write the mean and standard deviation of a model's scores into its config, over samples of the run's SFT model.

    Without that model they are taken over held-out answers. Returns lines about them, and the held-out verdict of a
    model that compares answers.
    """
    assert run.rm is not None
    scorer = Scorer(run, run.rm, model, tokenizer)
    rows = scorer.held_out_rows()
    if not rows:
        return ["there are no held-out rows, so its scores are not normalised"]
    corrected = run.rm.length_correction
    if corrected:
        fit_length(model, [row.lengths for row in rows], lambda: scorer.score_items(rows))
    answers = scorer.score_items(rows)
    found = policy_scores(scorer, rows, ("sft",)).get("SFT", answers)
    mean, std = scale_of(found)
    model.config.update({"score_mean": mean, "score_std": std})
    lines = [f"score_mean {mean:.4g} and score_std {std:.4g}, over {len(found)} texts"]
    lines += ["its scores are corrected for the length of replies (length_curve)"] * corrected
    return lines + ([held_out_verdict(figures_of_rankings(rows, answers))[0]] if run.rm.is_pairwise else [])


def _of_scores(scorer: Scorer, items: Drawn[ScoredIds], sentences: Sentences) -> dict[str, Any]:
    """Error, correlations or calibration of predicted scores or labels."""
    display, seed = sentences.display, scorer.run.seed
    predicted, settings = scorer.score_items(items), scorer.model.config
    mean, std = float(getattr(settings, "target_mean", 0.0)), float(getattr(settings, "target_std", 1.0))
    is_mse, target = scorer.config.loss == "mse", torch.tensor([row.score for row in items])
    length = torch.tensor([float(len(row.ids)) for row in items])
    found = predicted * std + mean
    figures = (score_figures if is_mse else label_figures)(found, target, seed=seed)
    figures["score_length_correlation"] = bootstrapped(correlation, found, length, seed=seed)
    show(display, f"RM, {items} held-out answers", {"value": figures})
    stated = found if is_mse else found.sigmoid()
    error = (stated.double() - target.double()).abs()
    tables = preferences.error_groups(error, target, length, items.by_source, seed=seed)
    for title, by_name in tables.items():
        show(display, f"RM absolute error by {title}", {"error": by_name}, counts=True)
    return {
        "figures": as_json(figures),
        "error_groups": {title: as_json(by_name) for title, by_name in tables.items()},
        "distributions": distributions({"held-out": predicted, **policy_scores(scorer, items)}, scorer, sentences),
        "worst_answers": preferences.worst_answers(items, stated, target),
    }


def _of_pairs(scorer: Scorer, ranked: Drawn[RankedIds], sentences: Sentences) -> dict[str, Any]:
    """Accuracy, calibration, length, invariance, and scores beside the scores of the policies' samples."""
    display, seed = sentences.display, scorer.run.seed
    found = scorer.score_ends(ranked)
    pairs = preferences.Pairs(ranked, found[0::2], found[1::2])
    figures = preferences.preference_figures(pairs, seed=seed)
    if not isinstance(scorer.encoder, ScoreEncoder):  # Pairs of labelled texts have no prompt.
        figures |= preferences.prefix_figures(pairs, scorer.encoder, scorer.score, seed=seed)
    tables = preferences.groups(pairs, pairs.right, ranked.by_source)
    chance = {name: preferences.CHANCE for name in preferences.AGAINST_CHANCE if name in figures}
    show(display, f"RM, {ranked} held-out pairs", {"value": figures, "chance": chance})
    longer = preferences.groups(pairs, pairs.longer_wins, ranked.by_source)
    spec = probe_rows(scorer.config)
    if spec is not None and (probes := list(scorer.tokenised(scorer.encoder_of(spec)).train)):
        shares = probe_shares(probes, scorer.score_items(probes))
        tables[PROBES], longer[PROBES] = ({name: share_figure(x[i]) for name, x in shares.items()} for i in (0, 1))
    for title, by_name in tables.items():
        chance_of_groups = dict.fromkeys(by_name, preferences.CHANCE)
        columns = {"accuracy": by_name, "chance": chance_of_groups, "longer wins": longer[title]}
        show(display, f"RM accuracy by {title}", columns, counts=True)
    bins = [one for one in reliability(torch.sigmoid(pairs.margin.abs()), pairs.right, low=0.5) if one.count]
    display.table(
        "RM reliability: stated confidence in the preferred answer, and how often it is the better one",
        ["confidence", "stated", "true", "pairs"],
        [[f"{b.low:.2f} to {b.high:.2f}", f"{b.confidence:.3f}", f"{b.frequency:.3f}", f"{b.count:,}"] for b in bins],
    )
    sides = {"better": pairs.better, "worse": pairs.worse, **policy_scores(scorer, ranked)}
    table = distributions(sides, scorer, sentences)
    sentences.say(held_out_verdict(as_metrics(figures))[0])
    for text in preferences.remarks(figures):
        sentences.say(text)
    if PROBES in tables:
        sentences.say(preferences.about_probes(tables[PROBES]))
    return {
        "figures": as_json(figures),
        "chance": as_json(chance),
        "groups": {title: as_json(by_name) for title, by_name in tables.items()},
        "groups_longer_wins": {title: as_json(by_name) for title, by_name in longer.items()},
        "reliability": [asdict(b) for b in bins],
        "scores": {name: values.tolist() for name, values in sides.items()},
        "distributions": table,
        "longer_by": pairs.longer_by.tolist(),
        "worst": preferences.worst_mistakes(pairs),
    }


def policy_scores(
    scorer: Scorer, rows: Sequence[RankedIds | ScoredIds], stages: Sequence[str] = ("sft", "ppo")
) -> dict[str, Tensor]:
    """Raw scores of a sample of SFT and of PPO for the prompts of some rows, for the stages that are finished.

    Both draw with the same random numbers. {} if rows have no prompt, or no prompt leaves room for a sample.
    """
    run, found = scorer.run, {}
    asked = [replace(one.row, answers=()) for one in rows if one.row.prompt.strip()]
    prompts = Drawn(asked, SAMPLED_ROWS, run.seed)
    for stage in stages:
        if stage not in run.stages or not prompts:
            continue
        policy, tokenizer = run.load(run.model_path(stage), scorer.config.precision)
        speaker = Speaker.at_evaluation(scorer.config, policy, tokenizer)
        fitting = [ids for _, ids in speaker.fitting(prompts)]
        if not fitting:
            continue
        uniforms = draw_uniforms(run.seed, "rm samples", 0, len(fitting), speaker.max_new_tokens)
        responses = speaker.respond(fitting, uniforms)
        texts = texts_of(
            scorer.model, scorer.tokenizer, tokenizer, fitting, responses, keep_special=speaker.form.keep_special
        )
        found[stage.upper()] = scorer.score([[ids] for ids, _ in texts], [[length] for _, length in texts])
    return found


def distributions(sides: dict[str, Tensor], scorer: Scorer, sentences: Sentences) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and percentiles of each side's scores, printed with how PPO normalises them."""
    table = {}
    for name, values in sides.items():
        numbers = values.double()
        percentiles = {f"p{q}": numbers.quantile(q / 100).item() for q in PERCENTILES}
        spread = numbers.std(correction=0).item()
        table[name] = {"mean": numbers.mean().item(), "std": spread, **percentiles, "rows": float(len(numbers))}
    heads = ["mean", "std", *(f"p{q}" for q in PERCENTILES)]
    lines = [[name, *(f"{row[head]:.2f}" for head in heads), f"{row['rows']:,.0f}"] for name, row in table.items()]
    title = "RM, raw scores of held-out answers, and of samples of the policies for their prompts"
    sentences.display.table(title, ["", *heads, "rows"], lines)
    mean, std = (getattr(scorer.model.config, name, None) for name in ("score_mean", "score_std"))
    if mean is not None and std is not None:
        sentences.say(
            f"these scores are raw. PPO's are score = (raw - score_mean) / score_std, with score_mean {mean:.3g} and "
            f"score_std {std:.3g}"
        )
    return table


def _of_benchmark(scorer: Scorer, name: str, rows: list[BenchRow], sentences: Sentences) -> dict[str, Any]:
    """The scores on a benchmark in the format of RewardBench 2, and whether they say something about PPO."""
    sequences, is_chat = encode_bench(rows, scorer.model, scorer.tokenizer, rm_rows(scorer.config))
    figures, chance = bench_figures(rows, scorer.score, sequences, seed=scorer.run.seed)
    columns = {"score": figures, "chance": {name: Figure(value) for name, value in chance.items()}}
    show(sentences.display, f"RM on {name}, {len(rows):,} rows", columns, counts=True)
    has_form = is_chat or scorer.config.data.prompt_template is not None
    if not has_form and (num_joined := sum(is_joined(one.row) for one in rows)):
        sentences.say(
            f"nothing separates prompt and answer in {num_joined} of {len(rows)} rows of {name}, because the "
            "model has no chat template and data.prompt_template is null"
        )
    if number := num_unpaired(rows):
        sentences.say(f"{number} rows of Ties in {name} lack their other row, ref or tied, and are not scored")
    shared = shares_base(scorer.run)
    if shared is None:
        sentences.say("it is not recorded which models the reward model and the policy come from")
    elif shared:
        sentences.say("reward model and policy come from the same model, so the benchmark says something about PPO")
    else:
        sentences.say(
            "by their manifests, reward model and policy do not come from the same model. A benchmark of reward "
            "models predicts PPO only if they do (Malik et al. 2025)"
        )
    return {"file": name, "rows": len(rows), "figures": as_json(figures), "chance": chance, "shares_base": shared}
