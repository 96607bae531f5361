"""Forward passes over a few held-out rows: what the files of a run do not say. Nothing is trained or written.

Each probe measures what one rule needs, on at most ROWS or PAIRS held-out rows of the stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.algorithms.statistics import pearson, wilson_interval
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.answers import RankedIds, RankingEncoder, answer_encoder
from rlhf_cli.data.encode import Example, encode_prompts, prompt_text
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder
from rlhf_cli.data.splits import Drawn
from rlhf_cli.data.tokens import tokenise
from rlhf_cli.data.views import ppo_rows, rm_rows, sft_rows
from rlhf_cli.errors import RunError, UserError
from rlhf_cli.evaluation.agreement import scores_of_rows
from rlhf_cli.evaluation.language_model import row_sums
from rlhf_cli.health.evidence import common_start
from rlhf_cli.health.history import paired
from rlhf_cli.models.forward import autocast, longest_input, positions, target_logprobs
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer, prepare
from rlhf_cli.processes.distributed import World, start
from rlhf_cli.rewards.base import Samples
from rlhf_cli.rewards.functions import call, load_function, named_numbers
from rlhf_cli.run.artifacts import model_directory
from rlhf_cli.trained.run import Run, open_run

ROWS = 200
"""Held-out demonstrations."""
PAIRS = 400
"""Held-out pairs. The standard error of an accuracy is then at most 0.025."""
AT_A_TIME = 16
TRAINING_ROWS = 20_000
"""Training pairs and prompts that are read."""
SEEN = 2000
"""Training rows and prompts whose words are read."""
LONG = 4
"""Characters of a text that all prompts share, to count as their template."""
MARKUP = ("</s>", "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "[/INST]", "<eos>", "<end_of_turn>")
"""Texts that end or begin a turn in other formats. As letters of an answer they are a mistake."""

Found = dict[str, float | str]
"""Figures, and texts."""


def probe(root: Path, device: str) -> tuple[Found, list[str]]:
    """The figures and texts of all probes on the finished stages of a run, and a line for each probe that failed.

    A model, data file or judge that is missing ends only its own probe.
    """
    world = start(device)
    figures: Found = {}
    problems = []
    try:
        run = open_run(root, stage=None, device=world.device, seed=0)
    except UserError as error:
        return {}, [str(error)]
    for stage, measure in (("sft", _sft), ("rm", _rm), ("rm", _judged), ("ppo", _prompts)):
        if stage in run.stages:
            try:
                figures |= measure(run)
            except (UserError, RunError) as error:
                problems.append(f"{stage}: {error}")
    return figures, problems


# ---------------------------------------------------------------------------------------------- SFT


@torch.no_grad()
def _sft(run: Run) -> Found:
    """SFT on its held-out demonstrations: loss, with the prompts of other rows too, entropy of the target tokens,
    probability of EOS at the end, and answers that contain the template."""
    assert run.sft is not None
    model, tokenizer = run.load(run.model_path("sft"))
    eos = int(tokenizer.eos_token_id)
    found: Found = {"sft.pad_is_eos": float(tokenizer.pad_token_id == eos)}
    data = tokenise(DemonstrationEncoder(tokenizer, sft_rows(run.sft)), longest=positions(model))
    found |= {"sft.skipped_share": data.skipped_share} | _demonstrations(data.train[:SEEN], tokenizer)
    rows = Drawn(data.test, min(ROWS, run.sft.evaluation.max_rows), run.seed)
    if not rows:
        return found
    sums = row_sums(model, rows, run.budget(model, run.sft.precision), run.sft.precision)
    found["sft.probed_loss"] = (sums.nll.sum() / sums.tokens.sum()).item()
    found["sft.token_entropy"] = _entropy([t for row in rows for t in _targets(row)])
    found |= _markup(rows, tokenizer) | _other_prompts(rows, sums.nll / sums.tokens, model, run)
    if ending := [row for row in rows if row.ids[-1] == eos and row.loss_mask[-1]]:
        found["sft.eos_probability"] = _eos_probability(model, ending, run)
    return found


def _demonstrations(rows: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Found:
    """Of training demonstrations: the share that does not end with EOS, the share of the most frequent answer, and how
    far answers repeat words of their own prompts."""
    texts = []
    for row in rows:
        parts = row.ids[: row.loss_mask.index(True)], _targets(row)
        texts.append([str(tokenizer.decode(part, skip_special_tokens=True)) for part in parts])
    answer, times = Counter(answer for _, answer in texts).most_common(1)[0]
    cut = sum(row.ids[-1] != tokenizer.eos_token_id for row in rows) / len(rows)
    found: Found = {"sft.cut_share": cut, "sft.answer_share": times / len(rows), "sft.answer": answer}
    return found | echo("sft", [(prompt, answer) for prompt, answer in texts])


def echo(stage: str, rows: Sequence[tuple[str, str]]) -> dict[str, float]:
    """By how much more of the words of an answer are in its own prompt than in the prompt of the row before.

    >>> rows = [("the red vase", "a red one"), ("the blue mug", "a blue one"), ("the red mug", "a mug")]
    >>> round(echo("sft", rows)["sft.echo"], 2)
    0.11
    """
    own, other = [], []
    for i, (prompt, answer) in enumerate(rows):
        if words := set(answer.split()):
            own.append(len(words & set(prompt.split())) / len(words))
            other.append(len(words & set(rows[i - 1][0].split())) / len(words))
    if len(own) < 2:
        return {}
    gain, error = paired(own, other)
    return {f"{stage}.echo": gain, f"{stage}.echo_error": error}


def _other_prompts(rows: Sequence[Example], own: torch.Tensor, model: PreTrainedModel, run: Run) -> dict[str, float]:
    """By how much the loss of an answer, [n] with its own prompt, rises behind the prompt of the row before.

    Rows count whose targets follow their prompt without a gap.
    """
    assert run.sft is not None
    prompts = [row.ids[: row.loss_mask.index(True)] for row in rows]
    mixed, kept = [], []
    for i, row in enumerate(rows):
        prompt, answer = prompts[i - 1], row.ids[len(prompts[i]) :]
        fits = positions(model) is None or len(prompt) + len(answer) <= (positions(model) or 0)
        if prompt and prompts[i] and prompt != prompts[i] and fits and all(row.loss_mask[len(prompts[i]) :]):
            mask = [False] * len(prompt) + [True] * len(answer)
            mixed.append(Example(prompt + answer, mask, row.where))
            kept.append(i)
    if len(mixed) < 2:
        return {}
    sums = row_sums(model, mixed, run.budget(model, run.sft.precision), run.sft.precision)
    gain, error = paired((sums.nll / sums.tokens).tolist(), own[kept].tolist())
    return {"sft.gain_of_prompt": gain, "sft.gain_of_prompt_error": error, "sft.mixed_rows": float(len(mixed))}


def _markup(rows: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Found:
    """The share of answers that contain words around the prompts or the end of a turn as letters, and which."""
    answers = [str(tokenizer.decode(_targets(row), skip_special_tokens=True)) for row in rows]
    prompts = {str(tokenizer.decode(row.ids[: row.loss_mask.index(True)], skip_special_tokens=True)) for row in rows}
    around = []
    if len(prompts) > 1:
        ends = common_start([prompt[::-1] for prompt in prompts])[::-1]
        around = [text.strip() for text in (common_start(list(prompts)), ends.strip().rpartition("\n")[2])]
    words = {text for text in (*around, *MARKUP, str(tokenizer.eos_token)) if len(text) >= LONG}
    counts = Counter(word for answer in answers for word in words if word in answer)
    if not counts:
        return {"sft.answers_with_markup": 0.0}
    word, count = counts.most_common(1)[0]
    return {"sft.answers_with_markup": count / len(rows), "sft.markup": word}


def _targets(row: Example) -> list[int]:
    return [token for token, is_target in zip(row.ids, row.loss_mask, strict=True) if is_target]


def _entropy(tokens: Sequence[int]) -> float:
    """The loss, in nats per token, of a model that knows only how frequent each of these tokens is.

    >>> round(_entropy([1, 1, 2, 2]), 3)  # log 2
    0.693
    """
    counts = Counter(tokens)
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in counts.values())


def _eos_probability(model: PreTrainedModel, rows: Sequence[Example], run: Run) -> float:
    """The mean probability that the model gives to EOS where the demonstrations end."""
    assert run.sft is not None
    found: list[float] = []
    for first in range(0, len(rows), AT_A_TIME):
        part = rows[first : first + AT_A_TIME]
        with autocast(run.device, run.sft.precision):
            masks = [[False] * (len(row.ids) - 1) + [True] for row in part]
            found += target_logprobs(model, [row.ids for row in part], masks).exp().tolist()
    return sum(found) / len(found)


# ----------------------------------------------------------------------------------------------- RM


@torch.no_grad()
def _rm(run: Run) -> Found:
    """The reward model on its held-out pairs, with and without EOS and by length; how far its weights moved; and
    whether its training pairs contradict each other."""
    assert run.rm is not None
    model, tokenizer = _reward_model(run)
    found: Found = {**_movement(model, model_directory(run.rm.stage_model(run.rm.model.path, "sft")))}
    train, rows, skipped = _pairs(run, model, tokenizer)
    found |= {"rm.skipped_share": skipped} | _contradictions(train[:TRAINING_ROWS]) | _marked(train[:SEEN])
    found |= echo("rm", [(pair.row.prompt, " ".join(pair.row.answers)) for pair in train[:SEEN]])
    if not rows:
        return found
    pairs = [[row.answers[0], row.answers[-1]] for row in rows]
    better, worse = _scores(model, pairs, run)
    longer = torch.tensor([float(len(a) - len(b)) for a, b in pairs])
    lengths = torch.tensor([float(len(ids)) for pair in pairs for ids in pair])
    right = wins(better, worse)
    found |= _share("rm.probed_accuracy", right)
    if len(worse_longer := right[longer < 0]):
        found |= _share("rm.accuracy_longer_is_worse", worse_longer)
    found["rm.score_length_correlation"] = pearson(torch.stack([better, worse], 1).flatten(), lengths)
    eos = tokenizer.eos_token_id
    if reads_last_token(model) and all(ids[-1] == eos and len(ids) > 1 for pair in pairs for ids in pair):
        without = wins(*_scores(model, [[a[:-1], b[:-1]] for a, b in pairs], run))
        gain, error = paired(without.tolist(), right.tolist()) if len(pairs) > 1 else (math.nan, math.nan)
        found |= {"rm.gain_without_eos": gain, "rm.gain_without_eos_error": error}
        found |= _share("rm.accuracy_without_eos", without)
    return found


def _reward_model(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = run.model_path("rm")
    model, tokenizer = load_reward_model(path), load_tokenizer(path)
    prepare(model, run.device)
    return model, tokenizer


def _pairs(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[RankedIds], Sequence[RankedIds], float]:
    """Training and held-out pairs or rankings of the rm stage, and the share of the former that is skipped.

    There are none for a stage that learns scores or labels.
    """
    assert run.rm is not None
    encoder = answer_encoder(tokenizer, rm_rows(run.rm), reads_last_token=reads_last_token(model))
    if not isinstance(encoder, RankingEncoder):
        return [], [], 0.0
    data = tokenise(encoder, longest=longest_input(model, tokenizer))
    return data.train, Drawn(data.test, min(PAIRS, run.rm.evaluation.max_rows), run.seed), data.skipped_share


def _marked(pairs: Sequence[RankedIds]) -> Found:
    """The word that tells best which answer is the better one, and the share of the pairs in which only the better one
    has it, less the share in which only the worse one has it."""
    counts: Counter[str] = Counter()
    for pair in pairs:
        better, worse = (set(pair.row.answers[which].split()) for which in (0, -1))
        counts.update(better - worse)
        counts.subtract(worse - better)
    word = max(counts, key=lambda word: abs(counts[word]), default=None)
    return {} if word is None else {"rm.word": word, "rm.word_share": counts[word] / len(pairs)}


def _contradictions(pairs: Sequence[RankedIds]) -> dict[str, float]:
    """How many training pairs repeat an earlier one, and the share of them that order it the other way round."""
    first: dict[tuple[str, frozenset[str]], str] = {}
    repeats = []
    for pair in pairs:
        best, key = pair.row.answers[0], (pair.row.prompt, frozenset((pair.row.answers[0], pair.row.answers[-1])))
        if key in first:
            repeats.append(first[key] != best)
        first.setdefault(key, best)
    share = {"rm.contradicted_share": sum(repeats) / len(repeats)} if repeats else {}
    return {"rm.repeated_pairs": float(len(repeats)), **share}


def _scores(model: PreTrainedModel, pairs: Sequence[list[list[int]]], run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of the better and of the worse answers, [n] each."""
    assert run.rm is not None
    precision = run.rm.precision
    scores = scores_of_rows(model, list(pairs), run.budget(model, precision), precision, World(0, 1, run.device))
    return scores[0::2], scores[1::2]


def _share(name: str, successes: torch.Tensor) -> dict[str, float]:
    """A share of rows with its 95 % interval and the number of rows."""
    total, n = successes.double().sum().item(), len(successes)
    low, high = wilson_interval(total, n)
    return {name: total / n, f"{name}_low": low, f"{name}_high": high, f"{name}_rows": float(n)}


def _movement(model: PreTrainedModel, start_path: str) -> dict[str, float]:
    """The largest relative change of a weight matrix of the backbone, from the model that it started from."""
    first = dict(load_policy(start_path).base_model.named_parameters())
    moved = 0.0
    for name, weight in model.base_model.named_parameters():
        old = first.get(name)
        if old is not None and old.shape == weight.shape and weight.dim() > 1:
            change = (weight.detach().cpu().float() - old.detach().float()).norm() / old.detach().float().norm()
            moved = max(moved, change.item())
    return {"rm.moved": moved}


@torch.no_grad()
def _judged(run: Run) -> Found:
    """The share of pairs in which the judge prefers the answer that the label prefers, and that the model prefers.

    Pairs that the judge scores equally do not count. Empty without a judge or without pairs.
    """
    if run.ppo is None or run.ppo.evaluation.gold is None or run.rm is None:
        return {}
    model, tokenizer = _reward_model(run)
    rows = _pairs(run, model, tokenizer)[1]
    if not rows:
        return {}
    judge = load_function(run.ppo.evaluation.gold)
    best, worst = (torch.tensor(_gold(judge, run.ppo, rows, which, tokenizer)) for which in (0, -1))
    gap, differ = best - worst, best != worst
    found: Found = {"ppo.gold_std": torch.cat([best, worst]).std(correction=0).item()}
    if not bool(differ.any()):
        return found
    better, worse = _scores(model, [[row.answers[0], row.answers[-1]] for row in rows], run)
    found |= _share("rm.judge_agrees_with_labels", (gap[differ] > 0).double())
    return found | _share("rm.judge_agrees_with_model", (gap * (better - worse) > 0)[differ].double())


def _gold(
    judge: Any, config: PPOConfig, rows: Sequence[RankedIds], which: int, tokenizer: PreTrainedTokenizerBase
) -> list[float]:
    """The judge's main number for one answer of each row."""
    template = config.data.prompt_template
    prompts = [row.row.prompt for row in rows]
    prompt_ids = encode_prompts(tokenizer, prompts, template)
    samples = Samples(
        [prompt_text(prompt, template, tokenizer) for prompt in prompts],
        [row.row.answers[which] for row in rows],
        prompt_ids,
        [row.answers[which] for row in rows],
        [True] * len(rows),
        [row.row.columns for row in rows],
        None,
        [row.row.where for row in rows],
        prompts,
    )
    advice = "Fix the function, or give --files-only"
    numbers = call(f"evaluation.gold ({config.evaluation.gold})", judge, samples, named_numbers, advice)
    return [row["gold"] if "gold" in row else next(iter(row.values())) for row in numbers]


# ---------------------------------------------------------------------------------------------- PPO


def _prompts(run: Run) -> Found:
    """How many of PPO's training prompts differ, and how many of their words the rows of SFT and RM lack."""
    assert run.ppo is not None
    tokenizer = load_tokenizer(run.model_path("ppo"))
    data = tokenise(PromptEncoder(tokenizer, ppo_rows(run.ppo)))
    prompts = [row.row.prompt for row in data.train[:TRAINING_ROWS]]
    found: Found = {"ppo.prompts": float(len(prompts)), "ppo.distinct_prompts": float(len(set(prompts)))}
    found["ppo.skipped_share"] = data.skipped_share
    if run.sft is not None:
        demonstrations = tokenise(DemonstrationEncoder(tokenizer, sft_rows(run.sft))).train[:SEEN]
        starts = [row.loss_mask.index(True) for row in demonstrations]
        # A row of plain text has no prompt: all of it is known.
        known = [row.ids[:start] if start > 1 else row.ids for row, start in zip(demonstrations, starts, strict=True)]
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in known]
        found |= _unknown("ppo.unknown_to_sft", prompts[:SEEN], texts)
    if run.rm is None:
        return found
    train, test, _ = _pairs(run, *_reward_model(run))
    texts = [row.row.prompt for row in train[:SEEN]]
    found |= _unknown("ppo.unknown_words", prompts[:SEEN], texts)
    return found | _unknown("rm.unknown_words", [row.row.prompt for row in test[:SEEN]], texts)


def _unknown(name: str, texts: Sequence[str], known_texts: Sequence[str]) -> dict[str, float]:
    """The share of the words of some texts that other texts lack.

    >>> _unknown("share", ["late again", "late"], ["it is late"])["share"] == 1 / 3
    True
    """
    known = {word for text in known_texts for word in text.split()}
    words = [word for text in texts for word in text.split()]
    return {name: sum(word not in known for word in words) / len(words)} if known and words else {}
