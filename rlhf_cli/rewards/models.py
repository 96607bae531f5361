"""Reward models: sequence classifiers, encoders or decoders, with the policy's tokenizer or their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.length import LengthCurve, reply_length, value_at
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.config.stage import Stage
from rlhf_cli.data.batches import Budget, in_order
from rlhf_cli.data.encode import Side, cut, encode_for_classifier
from rlhf_cli.data.records import Message, fill
from rlhf_cli.data.special_tokens import SpecialTokens, cut_behind_eos, special_tokens_of
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.cost import CPU_TOKENS
from rlhf_cli.models.forward import autocast, hidden_at, is_packed, longest_input, positions, scalar_head
from rlhf_cli.models.frozen import hold_frozen, is_held
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import (
    LENGTH_CURVE,
    check_vocabulary,
    load_reward_model,
    load_step_model,
    load_tokenizer,
    prepare,
    same_tokenizer,
)
from rlhf_cli.models.seq2seq import end_of_text
from rlhf_cli.models.shard import prepare_for
from rlhf_cli.packing import common_prefix, pack
from rlhf_cli.processes.microbatches import over_microbatches
from rlhf_cli.processes.sharding import device_of, gathered, is_sharded
from rlhf_cli.rewards.base import RewardSource, Samples, joined, shown
from rlhf_cli.run.artifacts import model_directory

if TYPE_CHECKING:
    from rlhf_cli.models.lora import Backbone

AT_A_TIME = Budget(CPU_TOKENS)


@dataclass(kw_only=True)
class RewardModel(RewardSource):
    """A sequence classifier that scores whole texts, the prompt with its response or the response alone."""

    kind: ClassVar[str] = "reward model"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reads_policy_tokens: bool
    """Score the policy's token ids directly; otherwise encode the text with the model's own tokenizer."""
    reads_prompt: bool
    template: str | None  # None uses prompt and response as the policy read and wrote them
    label: int
    as_probability: bool
    mean: float
    std: float
    precision: str
    budget: Budget = AT_A_TIME
    keep_special: bool = False
    """Special tokens in prompts and responses stay special. Otherwise only a template's tokens are special."""
    prompts_are_rendered: bool = False
    """Prompts come from a client's template: special tokens in them stay special without `template`."""
    num_cut: int = 0

    @property
    def shares_passes(self) -> bool:
        return is_sharded(self.model)

    def report(self) -> str:
        """One line about cut texts and failed scores, or ""."""
        longest, side = length_limit(self.model, self.tokenizer)
        lost = "beginning" if side == "left" else "end"
        cut = f"{self.name}: cut the {lost} of {self.num_cut} texts to the model's limit of {longest} tokens"
        return joined(cut if self.num_cut else "", super().report())

    def score(self, samples: Samples) -> torch.Tensor:
        """Normalized scores, [B] float32 on the CPU, each read at the last token of its response."""
        scores = torch.full((len(samples.responses),), torch.nan)
        rows: list[int] = []
        sequences: list[list[int]] = []
        try:
            rows, sequences = self._sequences(samples) if samples.responses else ([], [])
        finally:
            # If no text can be encoded, too: other processes may have some.
            found, features = scores_and_features(
                self.model,
                sequences,
                self.precision,
                self.budget,
                groups=[samples.prompts[i] for i in rows] if samples.prompts and self.reads_prompt else None,
                lengths=[reply_length(samples.responses[i], self.tokenizer.eos_token) for i in rows],
                label=self.label,
                as_probability=self.as_probability,
            )
        scores[rows] = (found - self.mean) / self.std
        self.features = None  # of this batch, also if it has no response
        if features is not None:
            self.features = torch.full((len(scores), features.shape[1]), torch.nan)
            self.features[rows] = features
        for row in rows:
            if not scores[row].isfinite():
                self.fail(samples, [row], f"returned {scores[row].item()}, it must be a finite number")
                scores[row] = torch.nan
        return scores

    def _sequences(self, samples: Samples) -> tuple[list[int], list[list[int]]]:
        """The rows that the model can score, and their token ids."""
        if self.reads_policy_tokens:
            prompts = samples.prompt_ids if self.reads_prompt else [[]] * len(samples.responses)
            eos = self.tokenizer.eos_token_id
            responses = [closed(r, end, eos) for r, end in zip(samples.response_ids, samples.ended, strict=True)]
            whole = [p + r for p, r in zip(prompts, responses, strict=True)]
            longest, side = trained_limit(self.model)
            longest = min(longest, positions(self.model))
            sequences, num_cut = cut_all(whole, longest, side, self.tokenizer.bos_token_id)
            rows = list(range(len(sequences)))
        else:
            texts = self._texts(samples)
            rows = list(texts)
            sequences, num_cut = encode_whole(
                self.model,
                self.tokenizer,
                list(texts.values()),
                [samples.ended[i] for i in rows],
                is_chat=self.template == "chat",
            )
        self.num_cut += num_cut
        return rows, sequences

    def _texts(self, samples: Samples) -> dict[int, str]:
        """The text to score for each row, by row number; a row that the chat template refuses is missing."""
        special = special_tokens_of(self.tokenizer)
        protect = str if self.keep_special else special.protect
        texts = {}
        for i, response in enumerate(samples.responses):
            prompt = samples.prompts[i] if samples.prompts and self.reads_prompt else ""
            own = samples.own_prompts[i] if samples.own_prompts else prompt
            messages = samples.messages[i] if samples.messages else ()
            if self.template is None and self.keep_special:
                texts[i] = prompt + response
            elif self.template is None:
                if not self.prompts_are_rendered:
                    prompt = special.protect_within(prompt, [m.content for m in messages] or [own])
                texts[i] = special.join(prompt, self._protected_response(response, special))
            elif self.template != "chat":
                texts[i] = fill(self.template, prompt=protect(own), response=protect(response))
            else:
                before = messages or (Message("user", own),)
                turns = [
                    {"role": m.role, "content": protect(m.content)} for m in (*before, Message("assistant", response))
                ]
                try:
                    texts[i] = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
                except Exception as error:
                    # The template is the tokenizer's program and runs in a sandbox; it can raise anything.
                    reason = shown(str(error)) or type(error).__name__
                    self.fail(samples, [i], f"its chat template failed: {reason}", error)
        return texts

    def _protected_response(self, response: str, special: SpecialTokens) -> str:
        """A response as plain text, but for an EOS that a client wrote behind it."""
        eos = self.tokenizer.eos_token
        text = response.rstrip()
        if not self.prompts_are_rendered or not eos or not text.endswith(eos):
            return special.protect(response)
        end = len(text) - len(eos)
        return special.protect(response[:end]) + response[end:]


def load_reward_source(
    reward: ModelReward,
    path: str,
    policy_tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    precision: str,
    *,
    name: str,
    key: str,
    keep_special: bool = False,
    backbone: Backbone | None = None,
    sharded_by: Stage | None = None,
    make: Callable[..., RewardModel] = RewardModel,
) -> tuple[RewardModel, list[str]]:
    """The reward model at `path`, made by `make` and ready to score, and notes for the user; see `load_rewards`.

    It scores the policy's token ids if its tokenizer equals `policy_tokenizer`, and text otherwise.
    """
    path = model_directory(path)
    later = sharded_by is not None or is_held(device, precision)
    on_backbone = backbone.reward_model(path) if backbone is not None else None
    load = load_reward_model if reward.steps is None else load_step_model
    model = on_backbone or load(path, reward.revision, deferred=later)
    tokenizer = load_tokenizer(path, reward.revision)
    check_vocabulary(model, tokenizer, path)
    if reward.template == "chat" and not tokenizer.chat_template:
        raise ConfigError(f"{key}.template: is chat, but the tokenizer of {path} has no chat template. Write one")
    model.requires_grad_(False)
    if on_backbone is None and sharded_by is None:
        hold_frozen(model, device, precision, exact=False)
    notes = [prepare_for(sharded_by, model, device) if sharded_by is not None else prepare(model, device)]
    if on_backbone is not None:
        notes.append(f"{path}: shares the policy's frozen weights")
    shares = (
        reward.template is None
        and reward.steps is None
        and policy_tokenizer is not None
        and reads_last_token(model)
        and same_tokenizer(policy_tokenizer, tokenizer)
    )
    if not shares:
        notes.append(f"{path}: scores text with its own tokenizer")
    mean, std = (getattr(model.config, figure, None) for figure in ("score_mean", "score_std"))
    if reward.normalize and reward.steps is None and (mean is None or std is None):
        notes.append(f"{path}: has no stored score mean and standard deviation, scores are not normalized")
    # The stored mean and standard deviation describe the logit.
    normalize = reward.normalize and mean is not None and std is not None and reward.output == "logit"
    source = make(
        name=name,
        weight=reward.share,
        on_error=reward.on_error,
        model=model,
        tokenizer=tokenizer,
        reads_policy_tokens=shares,
        reads_prompt=reward.reads == "prompt_and_response",
        template=reward.template,
        as_probability=reward.output == "probability",
        label=label_index(model, reward.label, f"{key}.label"),
        mean=float(mean or 0.0) if normalize else 0.0,
        std=float(std or 1.0) if normalize else 1.0,
        precision=precision,
        keep_special=keep_special,
    )
    return source, [note for note in notes if note]


def label_index(model: PreTrainedModel, label: str | None, key: str) -> int:
    """The index of the logit that is the score; raises ConfigError if it is ambiguous."""
    labels = {str(name): int(i) for i, name in (model.config.id2label or {}).items()}
    if model.config.num_labels == 1:
        if label is not None:
            raise ConfigError(f"{key}: the model has a single score, so a label does not apply. Remove it")
        return 0
    if label is None or label not in labels:
        found = "is missing" if label is None else f"found {label!r}"
        raise ConfigError(f"{key}: {found}, the model has the labels {', '.join(labels)}. Name the one to reward")
    return labels[label]


# ------------------------------------------------------------------------------------------- forward


def score_sequences(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], precision: str, budget: Budget = AT_A_TIME, **more: Any
) -> torch.Tensor:
    """The scores of `scores_and_features` alone."""
    return scores_and_features(model, sequences, precision, budget, **more)[0]


@torch.no_grad()
def scores_and_features(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    precision: str,
    budget: Budget = AT_A_TIME,
    *,
    groups: Sequence[Hashable] | None = None,
    lengths: Sequence[int] | None = None,
    label: int = 0,
    as_probability: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores of token sequences, [B]: a label's logit or its probability; and the hidden states that they are read
    from, [B, H], None for a model that pools in its own way and for no sequence. Both are float32 on the CPU.

    A model with a `length_curve` in its config is corrected by it. It needs `lengths`, the `reply_length` of each
    response. See `sequence_scores` for `groups`. All processes must call this for a sharded model, also one without a
    sequence.
    """
    shared = None
    if groups is not None and is_packed(model):
        members: dict[Hashable, list[list[int]]] = {}
        for sequence, group in zip(sequences, groups, strict=True):
            members.setdefault(group, []).append(list(sequence))
        prefix = {group: common_prefix(own) for group, own in members.items()}
        shared = [prefix[group] for group in groups]
    microbatches = budget.cut([len(ids) for ids in sequences], groups, shared)

    def score(rows: Sequence[int]) -> torch.Tensor:
        with autocast(device_of(model), precision):
            found = _labels_and_hidden(model, [sequences[i] for i in rows], groups and [groups[i] for i in rows])
        return torch.cat([x.float() for x in found], 1).cpu()

    parts = over_microbatches(microbatches, score, models=[model])
    if not sequences:
        return torch.zeros(0), None
    each = torch.stack(in_order(parts, microbatches))
    logits, features = each.tensor_split([int(model.config.num_labels or 1)], dim=1)
    if (curve := length_curve(model)) is not None:
        assert lengths is not None, "the model is corrected for the length of replies"
        logits = logits - value_at(curve, torch.tensor(lengths))[:, None].to(logits.dtype)
    if as_probability:
        logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
    return logits[:, label], features if features.shape[1] else None


def length_curve(model: PreTrainedModel) -> LengthCurve | None:
    """The part of the score that the length of a reply adds, as the RM stage found it (`length_correction`)."""
    pairs = getattr(model.config, LENGTH_CURVE, None)
    return None if pairs is None else LengthCurve(*torch.tensor(pairs, dtype=torch.float64).T.contiguous())


def sequence_scores(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], groups: Sequence[Hashable] | None = None
) -> torch.Tensor:
    """The scores of all labels for token sequences, with gradient, [B, labels] float32.

    ``score(hidden[last])``: the linear layer `score` on the last hidden state of the sequence's last token.

    Sequences with the same value in `groups` share a prompt, which is computed once; the scores do not change.
    An encoder uses its own pooling. The head runs in float32: bfloat16 would round margins away.
    """
    return _labels_and_hidden(model, sequences, groups)[0]


@gathered
def _labels_and_hidden(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], groups: Sequence[Hashable] | None
) -> tuple[torch.Tensor, ...]:
    """The scores of `sequence_scores`, and for a causal backbone the hidden states that they are read from, [B, H]."""
    if reads_last_token(model):
        batch = pack(sequences, device_of(model), groups=groups if is_packed(model) else None)
        hidden = hidden_at(model, batch, batch.last)
        return scalar_head(model.score, hidden), hidden
    if model.config.is_encoder_decoder:
        eos = end_of_text(model)  # where its score is read
        sequences = [ids if ids[-1:] == [eos] else [*ids, eos] for ids in map(list, sequences)]
    # Without a sequence: a pass over no rows (`models/forward.py`).
    return (padded_logits(model, sequences or [[0]])[: len(sequences)].float(),)


def padded_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logits of transformers' own forward pass over padded sequences.

    It runs in float32: unlike a causal model's, an encoder's head cannot be separated from its backbone.
    """
    device, width = device_of(model), max(map(len, sequences))
    ids = torch.full((len(sequences), width), model.config.pad_token_id or 0, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
    with torch.autocast(device.type, enabled=False):
        return model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits


# ------------------------------------------------------------------------------------------ the text that a model reads


def closed(response_ids: list[int], ended: bool, eos: int | None) -> list[int]:
    """A response with EOS behind it if another stop token or a stop string ended it: scores are read at EOS.

    >>> closed([5, 9], True, eos=2), closed([5, 2], True, eos=2), closed([5, 9], False, eos=2)
    ([5, 9, 2], [5, 2], [5, 9])
    """
    return [*response_ids, eos] if ended and eos is not None and response_ids[-1:] != [eos] else response_ids


def trained_limit(model: PreTrainedModel) -> tuple[int, Side]:
    """(longest sequence, side that is cut) from the RM stage; no limit if it cut no sequence (truncation "drop")."""
    longest, side = (getattr(model.config, figure, None) for figure in ("rlhf_max_length", "rlhf_truncation"))
    if isinstance(longest, int) and longest > 0 and side in ("left", "right"):
        return longest, "left" if side == "left" else "right"
    return sys.maxsize, "left"


def length_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, Side]:
    """`trained_limit`, or the longest input of the model if that is shorter."""
    longest, side = trained_limit(model)
    return min(longest, longest_input(model, tokenizer)), side


def cut_all(sequences: Sequence[list[int]], longest: int, side: Side, bos: int | None) -> tuple[list[list[int]], int]:
    """The sequences cut to at most `longest` tokens, a leading `bos` kept, and how many were cut.

    >>> cut_all([[1, 2, 3, 4], [1, 2]], 3, "left", None)
    ([[2, 3, 4], [1, 2]], 1)
    """
    return [cut(ids, longest, side, bos) for ids in sequences], sum(len(ids) > longest for ids in sequences)


def encode_whole(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    ended: Sequence[bool],
    *,
    is_chat: bool = False,
) -> tuple[list[list[int]], int]:
    """(ids of each text, number of texts cut), within the lengths that the model accepts and was trained on.

    A causal model gets EOS after a response that ended, an encoder its tokenizer's special tokens. A text from a chat
    template contains them; a model of our RM stage reads it up to EOS, as in its training.
    """
    if not texts:
        return [], 0
    longest, side = length_limit(model, tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if is_chat:
        encoded = special_tokens_of(tokenizer).encode(texts, add_special_tokens=False)
        if eos is not None and reads_last_token(model) and hasattr(model.config, "rlhf_max_length"):
            encoded = [cut_behind_eos(ids, int(eos)) for ids in encoded]
        return cut_all(encoded, longest, side, bos)
    sequences = encode_for_classifier(tokenizer, texts, None)
    if not reads_last_token(model) or eos is None:
        # The tokenizer cuts, so that it keeps its special tokens.
        long = [i for i, ids in enumerate(sequences) if len(ids) > longest]
        shorter = encode_for_classifier(tokenizer, [texts[i] for i in long], longest, side)
        for i, ids in zip(long, shorter, strict=True):
            sequences[i] = ids
        return sequences, len(long)
    whole = []
    for ids, end in zip(sequences, ended, strict=True):
        # A prompt in a chat template has its BOS, and the tokenizer adds another.
        kept = cut_behind_eos(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids, int(eos))
        bare = kept[:-1] if kept[-1:] == [int(eos)] else kept
        whole.append([*bare, int(eos)] if end or not bare else bare)
    return cut_all(whole, longest, side, bos)
