"""A language model on held-out demonstrations: loss, perplexity, accuracy, each with an interval over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.statistics import distinct_n, distinct_n_interval
from rlhf_cli.config.ppo import Rollout
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.evaluation.figures import mean_figure, rate_figure, ratio_figure, share_figure
from rlhf_cli.models.forward import scored_targets
from rlhf_cli.report.figure import Figure, Figures
from rlhf_cli.rewards.rules import repeated
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.speaker import Speaker

NGRAM = 4  # words of the n-grams whose repetition within a reply is counted


@dataclass(frozen=True)
class RowSums:
    """Sums over the target tokens of each held-out row, [n] float64 each."""

    nll: Tensor  # negative log-likelihood, in nats
    correct: Tensor  # number of targets that are the likeliest token
    tokens: Tensor  # number of targets


@torch.no_grad()
def row_sums(model: PreTrainedModel, rows: Sequence[Example], budget: Budget, precision: str) -> RowSums:
    """The sums of each row, in the order of the rows."""
    nll, correct = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.float64)
    tokens = torch.tensor([sum(row.loss_mask) for row in rows], dtype=torch.float64)
    for part, logprobs, is_likeliest in scored_targets(model, rows, budget, precision):
        owner = torch.repeat_interleave(torch.tensor(part), tokens[list(part)].long())
        nll.index_add_(0, owner, -logprobs)
        correct.index_add_(0, owner, is_likeliest)
    return RowSums(nll, correct, tokens)


def likelihood_figures(sums: RowSums, *, seed: int) -> Figures:
    """Loss and perplexity per target token, and the share of targets that are the likeliest token."""
    loss = ratio_figure(sums.nll, sums.tokens, seed=seed)
    value, low, high = (math.exp(min(x, 700.0)) for x in (loss.value, loss.low, loss.high))  # exp overflows above 709
    accuracy = ratio_figure(sums.correct, sums.tokens, seed=seed)
    return {"loss": loss, "perplexity": Figure(value, low, high, loss.rows), "token_accuracy": accuracy}


def loss_difference(sums: RowSums, other: RowSums, *, seed: int) -> Figure:
    """The loss per target token minus another model's loss on the same rows."""
    return ratio_figure(sums.nll - other.nll, sums.tokens, seed=seed)


def replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Example],
    config: SFTConfig,
    *,
    seed: int,
) -> tuple[list[dict[str, str]], Figures]:
    """A sampled reply to the prompt of each row, and the figures of their form; both empty without prompts.

    A prompt is what comes before the row's first target: the first token of a row that learns its prompt too. Prompts
    that leave no room for a reply are skipped.
    """
    speaker = Speaker.of(Rollout(max_new_tokens=config.evaluation.max_new_tokens), model, tokenizer, config.precision)
    beginnings = (row.ids[: row.loss_mask.index(True)] for row in rows)
    prompts = [ids for ids in beginnings if 0 < len(ids) <= speaker.longest_prompt]
    if not prompts:
        return [], {}
    uniforms = draw_uniforms(config.seed, "sft evaluation", 0, len(prompts), speaker.max_new_tokens)
    found = speaker.respond(prompts, uniforms)
    texts = list(map(speaker.text, found))
    lengths, ended = torch.tensor([float(len(one.ids)) for one in found]), torch.tensor([one.ended for one in found])
    shown = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    both = [{"prompt": prompt, "reply": text} for prompt, text in zip(shown, texts, strict=True)]
    return both, reply_figures(texts, lengths, ended, seed=seed)


def reply_figures(texts: Sequence[str], lengths: Tensor, ended: Tensor, *, seed: int) -> Figures:
    """Form of replies to n prompts: length, share that ended by itself, diversity, repetition within a reply."""
    words = [text.split() for text in texts]
    return {
        "length": mean_figure(lengths, seed=seed),
        "eos_rate": share_figure(ended),
        "distinct_1": Figure(distinct_n(words, 1), *distinct_n_interval(words, 1), len(texts)),
        "distinct_2": Figure(distinct_n(words, 2), *distinct_n_interval(words, 2), len(texts)),
        "repetition": rate_figure(torch.tensor([repeated(text, NGRAM) for text in words]), seed=seed),
    }
