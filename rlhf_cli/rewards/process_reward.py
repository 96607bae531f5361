"""A process reward model: a token classifier that scores each step of a response where the step ends.

The text of a response is cut into steps. The model reads the prompt and the steps, each with a marker behind it, in its
own tokens; a step's score is read at the end of its marker. It rewards the policy's token that ends the step, so the
two tokenizers need nothing in common.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.rewards import Steps
from rlhf_cli.data.batches import Budget, in_order
from rlhf_cli.data.records import fill
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.models.forward import autocast, hidden_at, is_packed, longest_input, scalar_head
from rlhf_cli.models.heads import scalar_heads
from rlhf_cli.packing import pack
from rlhf_cli.processes.microbatches import over_microbatches
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.rewards.base import RewardSource, Samples, joined
from rlhf_cli.rewards.models import RewardModel, padded_logits

Tokens = tuple[list[int], list[int]]
"""The ids that the model reads, and the index of the last one of each step."""


@dataclass(kw_only=True)
class StepModel(RewardModel):
    """A token classifier. `label`, `as_probability`, `template` and `budget` are as for a reward model."""

    kind: ClassVar[str] = "step reward model"
    steps: Steps
    policy_tokenizer: PreTrainedTokenizerBase
    per_token: bool = True

    def report(self) -> str:
        """One line about cut texts and failed scores, or ""."""
        longest = longest_input(self.model, self.tokenizer)
        cut = f"{self.name}: the last steps of {self.num_cut} texts have no score, beyond the model's {longest} tokens"
        return joined(cut if self.num_cut else "", RewardSource.report(self))

    def score(self, samples: Samples) -> torch.Tensor:
        """The sum of the scores of each response's steps, [B]; NaN for a failed row."""
        rows = self.score_per_token(samples)
        return torch.tensor([torch.nan if row is None else sum(row) for row in rows])

    def score_per_token(self, samples: Samples) -> list[list[float] | None]:
        """For each response token the scores of the steps that end there; None for a row that failed.

        An unfinished step, of a response that was cut, and steps behind the model's longest input have no score.
        """
        found: list[list[float] | None] = [[0.0] * len(ids) for ids in samples.response_ids]
        cut = [split_steps(t, self.steps.separator, e) for t, e in zip(samples.responses, samples.ended, strict=True)]
        rows = [i for i, steps in enumerate(cut) if steps]
        read = [self._tokens(samples, i, [step for step, _ in cut[i]]) for i in rows]
        scores = step_scores(self.model, read, self.precision, self.budget, as_probability=self.as_probability)
        for i, each in zip(rows, scores, strict=True):
            if not each.isfinite().all():
                self.fail(samples, [i], f"returned {each[:, self.label].tolist()}, they must be finite numbers")
                found[i] = None
                continue
            at = token_ends(self.policy_tokenizer, samples.response_ids[i], [end for _, end in cut[i]])
            own = [0.0] * len(samples.response_ids[i])
            share = 1 / len(each) if self.steps.average and len(each) else 1.0
            for token, score in zip(at, each[:, self.label].tolist(), strict=False):  # the last ones may be cut
                own[token] += share * score
            found[i] = own
        return found

    def _tokens(self, samples: Samples, row: int, steps: list[str]) -> Tokens:
        """The prompt and the steps of a response in the model's own tokens. Text is never read as a special token."""
        special, bos = special_tokens_of(self.tokenizer), self.tokenizer.bos_token_id
        protect = str if self.keep_special else special.protect
        own = samples.own_prompts[row] if samples.own_prompts else samples.prompts[row]
        messages = samples.messages[row] if samples.messages else ()
        if self.template is not None:
            before = fill(self.template.partition("{response}")[0], prompt=protect(own))
        elif self.keep_special:
            before = samples.prompts[row]
        else:
            before = special.protect_within(samples.prompts[row], [m.content for m in messages] or [own])
        marker = self.steps.separator if self.steps.marker is None else self.steps.marker
        encoded = special.encode([before, marker, *map(protect, steps)], add_special_tokens=False)
        # The special tokens that the tokenizer puts before and behind a text.
        bare, whole = (list(self.tokenizer("a", add_special_tokens=x)["input_ids"]) for x in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        ids, ends = [*whole[:at], *encoded[0]], list[int]()
        if bos is not None and ids[:2] == [bos, bos]:  # a chat template has its own
            ids = ids[1:]
        for step in encoded[2:]:
            ids += [*step, *encoded[1]]
            ends.append(len(ids) - 1)
        ids += whole[at + len(bare) :]
        longest = longest_input(self.model, self.tokenizer)
        self.num_cut += len(ids) > longest
        return ids[:longest], [end for end in ends if end < longest]


def split_steps(text: str, separator: str, ended: bool) -> list[tuple[str, int]]:
    """(step, characters of the text up to the end of its separator) for each step of a response.

    White space alone is no step. The rest behind the last separator is one if the response `ended`; its end counts as
    one character behind the text.

    >>> split_steps("a. b. . c", ". ", True), split_steps("a. b", ". ", False)
    ([('a', 3), ('b', 8), ('c', 10)], [('a', 3)])
    """
    found: list[tuple[str, int]] = []
    start = 0
    while (at := text.find(separator, start)) >= 0:
        step, start = text[start:at], at + len(separator)
        if step.strip():
            found.append((step, start))
        elif found:
            found[-1] = found[-1][0], start
    if ended and text[start:].strip():
        found.append((text[start:], len(text) + 1))
    return found


def token_ends(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: Sequence[int]) -> list[int]:
    """The index of the token in which each step ends, from the numbers of characters up to them.

    The end behind the text is in the last token, which may be EOS or belong to a stop string.
    """

    def num_characters(number: int) -> int:
        """The characters of the first tokens; the bytes of a character that goes on in the next token are none."""
        return len(str(tokenizer.decode(ids[: number + 1], skip_special_tokens=True)).rstrip("\ufffd"))

    return [bisect_left(range(len(ids) - 1), end, key=num_characters) for end in ends]


@torch.no_grad()
def step_scores(
    model: PreTrainedModel, rows: Sequence[Tokens], precision: str, budget: Budget, *, as_probability: bool
) -> list[torch.Tensor]:
    """The logits or probabilities of all labels at the end of each step, [steps, labels] float32 on the CPU."""
    if not rows:
        return []
    microbatches = budget.cut([len(ids) for ids, _ in rows])

    def score(numbers: Sequence[int]) -> list[torch.Tensor]:
        device, read = device_of(model), [rows[i] for i in numbers]
        with autocast(device, precision):
            logits = _logits(model, read)
        if as_probability:
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
        return list(logits.cpu().split([len(ends) for _, ends in read]))

    return in_order(over_microbatches(microbatches, score, models=[model]), microbatches)


def _logits(model: PreTrainedModel, rows: Sequence[Tokens]) -> torch.Tensor:
    """The logits of all steps, row by row, [steps, labels] float32."""
    if is_packed(model):
        device = device_of(model)
        batch = pack([ids for ids, _ in rows], device)
        starts = accumulate((len(ids) for ids, _ in rows), initial=0)
        at = [start + end for start, (_, ends) in zip(starts, rows, strict=False) for end in ends]
        (head,) = scalar_heads(model).values()
        return scalar_head(head, hidden_at(model, batch, torch.tensor(at, dtype=torch.int64, device=device))).float()
    logits = padded_logits(model, [ids for ids, _ in rows])
    return torch.cat([logits[i, ends] for i, (_, ends) in enumerate(rows)]).float()
