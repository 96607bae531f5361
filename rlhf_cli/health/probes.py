"""Forward passes over a few held-out rows: what the files of a run do not say. Nothing is trained or written.

Each probe measures what one rule needs, on at most ROWS or PAIRS held-out rows of the stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.algorithms.statistics import pearson, wilson_interval
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.answers import RankedIds, RankingEncoder
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encode import Example, RowText
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder
from rlhf_cli.data.records import Record
from rlhf_cli.data.splits import Drawn
from rlhf_cli.data.stage_rows import ppo_rows, sft_rows
from rlhf_cli.errors import RunError, UserError
from rlhf_cli.evaluation.likelihood import row_sums
from rlhf_cli.evaluation.reward_model import Scorer
from rlhf_cli.health.evidence import common_end, common_start
from rlhf_cli.health.history import paired
from rlhf_cli.models.forward import positions
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer
from rlhf_cli.models.save import base_of
from rlhf_cli.processes.distributed import start
from rlhf_cli.rewards.base import Samples
from rlhf_cli.rewards.sources import load_judge, main_number
from rlhf_cli.trained.run import Run, open_run

ROWS = 200
"""Held-out demonstrations."""
PAIRS = 400
"""Held-out pairs. The standard error of an accuracy is then at most 0.025."""
TRAINING_ROWS = 20_000
"""Training pairs and prompts that are read."""
SEEN = 2000
"""Training rows and prompts whose words are read."""
OFTEN, OFTEN_ROWS = 0.02, 5
"""Share and number of the training demonstrations that have a frequent answer."""
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
    try:
        run = open_run(root, stage=None, device=world.device, seed=0)
    except UserError as error:
        return {}, [str(error)]
    figures: Found = {}
    problems = []
    probes = Probes(run)
    measures = {"sft": (probes.sft,), "rm": (probes.rm, probes.judged, probes.moved), "ppo": (probes.ppo,)}
    for stage in run.stages:
        for measure in measures[stage]:
            try:
                with torch.no_grad():
                    figures |= measure()
            except (UserError, RunError) as error:
                problems.append(f"{stage}: {error}")
    return figures, list(dict.fromkeys(problems))


@dataclass
class Probes:
    """What the models and rows of a run show. The reward model and its pairs are read once for all probes."""

    run: Run

    @cached_property
    def scorer(self) -> Scorer:
        assert self.run.rm is not None
        path = self.run.model_path("rm")
        return Scorer(self.run, self.run.rm, load_reward_model(path), load_tokenizer(path))

    @cached_property
    def pairs(self) -> tuple[Sequence[RankedIds], Sequence[RankedIds], float]:
        """Training and held-out pairs or rankings, and the share of the former that is skipped. There are none for a
        stage that learns scores or labels."""
        scorer = self.scorer
        if not isinstance(scorer.encoder, RankingEncoder):
            return [], [], 0.0
        data = scorer.tokenised(scorer.encoder)
        held_out = Drawn(data.test, min(PAIRS, scorer.config.evaluation.max_rows), self.run.seed)
        return data.train, held_out, data.skipped_share

    @cached_property
    def scores(self) -> Tensor:
        """The scores of the better and the worse answer of each held-out pair, [n, 2]."""
        return self.scorer.score_ends(self.pairs[1]).view(-1, 2)

    def sft(self) -> Found:
        """SFT's training demonstrations, and the model on held-out ones: loss, with the prompts of other rows too,
        entropy of the target tokens, probability of EOS at the end, and answers that contain the template."""
        run = self.run
        assert run.sft is not None
        precision = run.sft.precision
        model, tokenizer = run.load(run.model_path("sft"))
        eos, budget = int(tokenizer.eos_token_id), run.budget(model, precision)
        found: Found = {"sft.pad_is_eos": float(tokenizer.pad_token_id == eos)}
        data = tokenise(DemonstrationEncoder(tokenizer, sft_rows(run.sft)), longest=positions(model))
        found |= {"sft.skipped_share": data.skipped_share} | _demonstrations(data.train[:SEEN], tokenizer)
        rows = Drawn(data.test, min(ROWS, run.sft.evaluation.max_rows), run.seed)
        if not rows:
            return found
        sums = row_sums(model, rows, budget, precision)
        own = sums.nll / sums.tokens
        found["sft.probed_loss"] = (sums.nll.sum() / sums.tokens.sum()).item()
        # The loss of a model that knows only how frequent each of these tokens is.
        counts = Counter(token for row in rows for token in _parts(row)[1])
        shares = [n / counts.total() for n in counts.values()]
        found["sft.token_entropy"] = -sum(share * math.log(share) for share in shares)
        found |= _markup(_texts(rows, tokenizer), str(tokenizer.eos_token))
        mixed = _with_other_prompts(rows, positions(model))
        if len(mixed) > 1:
            sums = row_sums(model, list(mixed.values()), budget, precision)
            gain, error = paired((sums.nll / sums.tokens).tolist(), own[list(mixed)].tolist())
            found |= {"sft.gain_of_prompt": gain, "sft.gain_of_prompt_error": error}
        found["sft.mixed_rows"] = float(len(mixed))
        ended = [row for row in rows if row.loss_mask[-1] and row.ids[-1] == eos]
        if ended:
            ends = [Example(row.ids, [False] * (len(row.ids) - 1) + [True], row.where) for row in ended]
            found["sft.eos_probability"] = row_sums(model, ends, budget, precision).nll.neg().exp().mean().item()
        return found

    def rm(self) -> Found:
        """The reward model on held-out pairs, with and without EOS and by length; and what its training pairs say."""
        train, held_out, skipped = self.pairs
        found: Found = {"rm.skipped_share": skipped, **_contradictions(train[:TRAINING_ROWS]), **_marked(train[:SEEN])}
        found |= echo("rm", [(pair.row.prompt, " ".join(pair.row.texts)) for pair in train[:SEEN]])
        if not held_out:
            return found
        right = wins(*self.scores.unbind(1))
        answers = [[row.answers[0], row.answers[-1]] for row in held_out]  # as tokens
        lengths = torch.tensor([[float(len(ids)) for ids in pair] for pair in answers])
        found |= {"rm.probed_accuracy": right.mean().item(), "rm.probed_accuracy_rows": float(len(right))}
        found["rm.score_length_correlation"] = pearson(self.scores.flatten(), lengths.flatten())
        eos = self.scorer.tokenizer.eos_token_id
        ended = all(ids[-1] == eos and len(ids) > 1 for pair in answers for ids in pair)
        if reads_last_token(self.scorer.model) and ended and len(right) > 1:
            cut = [[ids[:-1] for ids in pair] for pair in answers]
            earlier = self.scorer.score(cut, [[row.lengths[0], row.lengths[-1]] for row in held_out]).view(-1, 2)
            without = wins(*earlier.unbind(1))
            gain, error = paired(without.tolist(), right.tolist())
            found |= {"rm.gain_without_eos": gain, "rm.gain_without_eos_error": error}
            found["rm.accuracy_without_eos"] = without.mean().item()
        return found

    def moved(self) -> Found:
        """The largest relative change of a weight matrix of the backbone, from the model that it started from."""
        base = base_of(self.scorer.config)
        first = load_policy(base.path, base.revision)
        old = dict(first.base_model.named_parameters())
        moved = 0.0
        for name, weight in self.scorer.model.base_model.named_parameters():
            if name in old and old[name].shape == weight.shape and weight.dim() > 1:
                before = old[name].float()
                moved = max(moved, ((weight.cpu().float() - before).norm() / before.norm()).item())
        return {"rm.moved": moved}

    def judged(self) -> Found:
        """The share of pairs in which the judge prefers the answer that the label prefers, and that the model prefers.

        Pairs that the judge scores equally do not count. Empty without a judge or without pairs.
        """
        config, held_out = self.run.ppo, self.pairs[1]
        if config is None or config.evaluation.gold is None or not held_out:
            return {}
        gold = torch.tensor([_gold(config, held_out, which, self.scorer.tokenizer) for which in (0, -1)])
        gap = gold[0] - gold[1]
        differ = gap != 0
        found: Found = {"ppo.gold_std": gold.std(correction=0).item()}
        rows, prefers = int(differ.sum()), self.scores[:, 0] - self.scores[:, 1]
        for name, agrees in (("labels", gap > 0), ("model", gap * prefers > 0)) if rows else ():
            right, key = agrees[differ].double().sum().item(), f"rm.judge_agrees_with_{name}"
            found |= {key: right / rows, f"{key}_rows": float(rows), f"{key}_high": wilson_interval(right, rows)[1]}
        return found

    def ppo(self) -> Found:
        """How many of PPO's training prompts differ, and how many of their words the rows of SFT and RM lack."""
        run = self.run
        assert run.ppo is not None
        tokenizer = load_tokenizer(run.model_path("ppo"))
        data = tokenise(PromptEncoder(tokenizer, ppo_rows(run.ppo)))
        prompts = [row.row.prompt for row in data.train[:TRAINING_ROWS]]
        found: Found = {"ppo.prompts": float(len(prompts)), "ppo.distinct_prompts": float(len(set(prompts)))}
        found["ppo.skipped_share"], seen = data.skipped_share, prompts[:SEEN]
        if run.sft is not None:
            rows = tokenise(DemonstrationEncoder(tokenizer, sft_rows(run.sft))).train[:SEEN]
            known = [prompt or text for prompt, text in _texts(rows, tokenizer)]
            found |= _unknown("ppo.unknown_to_sft", seen, known)
        if run.rm is None:
            return found
        train, held_out = ([row.row.prompt for row in rows[:SEEN]] for rows in self.pairs[:2])
        return found | _unknown("ppo.unknown_words", seen, train) | _unknown("rm.unknown_words", held_out, train)


def _parts(row: Example) -> tuple[list[int], list[int]]:
    """The prompt of a demonstration, empty for a row of plain text, and its targets."""
    first = row.loss_mask.index(True)
    targets = [token for token, is_target in zip(row.ids, row.loss_mask, strict=True) if is_target]
    return row.ids[:first] if first > 1 else [], targets


def _texts(rows: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The prompt and the answer of each demonstration, without special tokens."""
    parts = [_parts(row) for row in rows]
    prompts, answers = (tokenizer.batch_decode(list(one), skip_special_tokens=True) for one in zip(*parts, strict=True))
    return list(zip(prompts, answers, strict=True))


def _demonstrations(rows: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Found:
    """Figures of training demonstrations: the share that does not end with EOS, the shares of the most frequent answer
    and of all frequent ones, and how far answers repeat words of their own prompts."""
    texts = _texts(rows, tokenizer)
    (answer, times), *others = Counter(answer for _, answer in texts).most_common()
    often = [n for n in (times, *(n for _, n in others)) if n >= max(OFTEN_ROWS, OFTEN * len(rows))]
    cut = sum(row.ids[-1] != tokenizer.eos_token_id for row in rows)
    found: Found = {"sft.cut_share": cut / len(rows), "sft.answer": answer, "sft.answer_share": times / len(rows)}
    found |= {"sft.frequent_share": sum(often) / len(rows), "sft.frequent_answers": float(len(often))}
    if others:
        found["sft.other_words"] = sum(len(text.split()) * n for text, n in others) / (len(rows) - times)
    return found | echo("sft", texts)


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


def _with_other_prompts(rows: Sequence[Example], longest: int | None) -> dict[int, Example]:
    """By their number, the rows with the prompt of the row before. Without those that are then too long, and those
    whose targets do not follow their prompt without a gap."""
    mixed = {}
    for i, row in enumerate(rows):
        (prompt, _), (own, answer) = _parts(rows[i - 1]), _parts(row)
        fits = longest is None or len(prompt) + len(answer) <= longest
        if prompt and own and prompt != own and fits and row.ids == own + answer:
            mixed[i] = Example(prompt + answer, [False] * len(prompt) + [True] * len(answer), row.where)
    return mixed


def _markup(texts: Sequence[tuple[str, str]], eos: str) -> Found:
    """The share of answers that contain words around the prompts or the end of a turn as letters, and which."""
    prompts = {prompt for prompt, _ in texts}
    around = []
    if len(prompts) > 1:
        around = [common_start(prompts).strip(), common_end(prompts).strip().rpartition("\n")[2].strip()]
    words = dict.fromkeys(text for text in (*around, *MARKUP, eos) if len(text) >= LONG)
    counts = Counter(word for _, answer in texts for word in words if word in answer)
    if not counts:
        return {"sft.answers_with_markup": 0.0}
    word, count = counts.most_common(1)[0]
    return {"sft.answers_with_markup": count / len(texts), "sft.markup": word}


def _marked(pairs: Sequence[RankedIds]) -> Found:
    """The word or last letter that tells best which answer is the better one, and the share of the pairs in which only
    the better one has it, less the share in which only the worse one has it."""
    counts: Counter[str] = Counter()
    for pair in pairs:
        texts = (pair.row.texts[which].strip() for which in (0, -1))
        better, worse = ({*text.split(), f"{text[-1:]} at the end"} for text in texts)
        counts.update(better - worse)
        counts.subtract(worse - better)
    word = max(sorted(counts), key=lambda word: abs(counts[word]), default=None)
    return {} if word is None else {"rm.word": word, "rm.word_share": counts[word] / len(pairs)}


def _contradictions(pairs: Sequence[RankedIds]) -> dict[str, float]:
    """How many training pairs repeat an earlier one, and the share of them that order it the other way round."""
    first: dict[tuple[str, frozenset[str]], str] = {}
    repeats = []
    for pair in pairs:
        best, key = pair.row.texts[0], (pair.row.prompt, frozenset((pair.row.texts[0], pair.row.texts[-1])))
        if key in first:
            repeats.append(first[key] != best)
        first.setdefault(key, best)
    share = {"rm.contradicted_share": sum(repeats) / len(repeats)} if repeats else {}
    return {"rm.repeated_pairs": float(len(repeats)), **share}


def _gold(config: PPOConfig, rows: Sequence[RankedIds], which: int, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """The judge's main number for one answer of each row."""
    text = RowText(tokenizer, config.data.prompt_template)
    prompts = [text.prompt(Record(row.row.prompt, row.row.where)) for row in rows]
    answers, columns = [row.row.texts[which] for row in rows], [row.row.columns for row in rows]
    samples = Samples(prompts, answers, [], [], [True] * len(rows), columns, where=[row.row.where for row in rows])
    judge = load_judge(str(config.evaluation.gold), "Fix the function, or give --files-only")
    return [row[main_number(row)] for row in judge(samples)]


def _unknown(name: str, texts: Sequence[str], known_texts: Sequence[str]) -> dict[str, float]:
    """The share of the words of some texts that other texts lack.

    >>> _unknown("share", ["late again", "late"], ["it is late"])["share"] == 1 / 3
    True
    """
    known = {word for text in known_texts for word in text.split()}
    words = [word for text in texts for word in text.split()]
    return {name: sum(word not in known for word in words) / len(words)} if known and words else {}
