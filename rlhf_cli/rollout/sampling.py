"""From prompts to sampled responses with their log-probabilities, and the distribution that tokens are drawn from.

The caller supplies one uniform number per prompt and token, at which the cumulative distribution is inverted. So a
response depends only on its prompt and its row of uniforms, not on the rest of the batch.

A filter changes the distribution that tokens are drawn from, and ratio, KL and entropy must use that distribution.
Each response therefore stores the ids that each of its tokens was drawn from, or the few that were forbidden, and
`allowed_logits` masks all other ids for every model, as DeepSeek-V3.2 (2025) does. A filter alone then leaves the
ratio at 1 and the KL at 0.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.ppo import DecoderName, Rollout
from rlhf_cli.decoders.decoder import Decoder, choose_decoder, join_sampling, recorded
from rlhf_cli.errors import ConfigError
from rlhf_cli.packing import end_to_end
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.processes.threads import in_threads, is_large
from rlhf_cli.seeding import generator

LEAST_TEMPERATURE = 1e-6
"""The inverse of a much lower one overflows float32, and every probability would be NaN."""
REFILL = 0.25
"""Waiting prompts enter once this share of max_live_rows is free: reading many together costs less per prompt."""
BLOCK = 64  # tokens per block of the two-level cumulative sum in `draw`
BELOW_1 = 1 - 2.0**-23
"""x * BELOW_1 < x for every positive float32 x. The largest uniform, 1 - 2**-24, does not guarantee that."""
SHARED_STEP = 20_000_000
"""Weights of a model from which all cores share the products of a decoding step, where its rows are one group."""
FIRST_LOOK = 1024
"""top_p first orders this many of the likeliest tokens, and more only if their probability does not reach p: ordering
a whole vocabulary of 150,000 takes 20 times as long."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the settings of `rollout` (`Rollout` in config/ppo.py), with the stop tokens as ids.

    The steps, in order: divide the logits by the temperature; forbid stop tokens before min_new_tokens and tokens that
    would repeat an n-gram; keep top_k, then top_p of the renormalised rest, then min_p; renormalise.
    """

    temperature: float = 1.0
    top_k: int | None = None
    """At least 1 (Fan et al. 2018). Among equally likely tokens the lowest ids are kept, so 1 is greedy decoding."""
    top_p: float | None = None
    """Above 0 (Holtzman et al. 2020). The token that crosses p is kept; 1 keeps all tokens."""
    min_p: float | None = None
    """Above 0, at most 1 (Nguyen et al. 2024)."""
    no_repeat_ngram_size: int | None = None
    """At least 1 (Paulus et al. 2017). Where that would forbid every token, it forbids none."""
    min_new_tokens: int = 0
    """Stop tokens cannot be drawn before, and a stop string that is complete before ends nothing."""
    stop: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """None is empty. The token that completes one is the response's last. The text that is searched has no special
    tokens: list these in `stop`."""
    decoder: DecoderName = "auto"  # the decoders differ by rounding only

    @property
    def filters(self) -> bool:
        """True if some tokens are filtered out for their low probability."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1) or self.min_p is not None

    @property
    def restricts(self) -> bool:
        """True if some tokens cannot be drawn: filtered out, repeating an n-gram, or a stop too early."""
        ends_later = self.min_new_tokens > 1 and bool(self.stop)
        return self.filters or self.no_repeat_ngram_size is not None or ends_later


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    ids: list[int]
    """Its tokens, including the stop token or the tokens of the stop string."""
    logprobs: list[float]
    """Log-probability of each token under the tempered and filtered distribution that it was drawn from."""
    ended: bool
    """True if a stop token or a stop string ended it, False if it reached `max_new_tokens`."""
    allowed_ids: Sequence[Sequence[int]] | None = None
    """With a filter: the ids that each token was drawn from, in ascending order. None without a filter. The sampler
    makes arrays, as a list takes ten times the memory."""
    forbidden_ids: list[list[int]] | None = None
    """With `no_repeat_ngram_size` and no filter: the ids that would have repeated an n-gram at each token."""


def draw_uniforms(seed: int, purpose: str, iteration: int, rows: int, columns: int) -> Tensor:
    """The uniforms [rows, columns] of one iteration, in [0, 1), the same on every device."""
    return torch.rand(rows, columns, generator=generator(seed, purpose, iteration))


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All tokens that end a response: the tokenizer's EOS, and every eos_token_id of generation_config."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(eos) if isinstance(eos, list | tuple) else {eos}
    return {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}


def sampling_of(rollout: Rollout, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """The sampling that a config asks for. Raises ConfigError for a stop token that is not in the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    for token in rollout.stop_tokens:
        if token not in vocabulary:
            raise ConfigError(
                f"rollout.stop_tokens: {token!r} is not a single token of the tokenizer. List it under "
                "rollout.stop_strings"
            )
    return Sampling(
        temperature=max(rollout.temperature, LEAST_TEMPERATURE),
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        no_repeat_ngram_size=rollout.no_repeat_ngram_size,
        min_new_tokens=rollout.min_new_tokens,
        stop=frozenset(stop_ids(policy, tokenizer) | {vocabulary[token] for token in rollout.stop_tokens}),
        stop_strings=tuple(rollout.stop_strings),
        decoder=rollout.decoder,
    )


def generation_config(sampling: Sampling, base: GenerationConfig) -> GenerationConfig:
    """The config with which transformers draws as `sampling` does, except stop strings.

    It keeps the special tokens and the lengths of the base model's, and none of its filters, beams and forced tokens.
    transformers' `min_new_tokens` does not count the stop token.
    """
    kept = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens")
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        min_new_tokens=max(0, sampling.min_new_tokens - 1) or None,
        eos_token_id=sorted(sampling.stop),
        **{name: getattr(base, name) for name in kept},
    )


def response_text(tokenizer: PreTrainedTokenizerBase, response: Response, sampling: Sampling) -> str:
    """The response as users and reward models read it: without special tokens and without the stop string.

    If several stop strings ended it, the text is cut before the one that begins first. A stop string that was complete
    before min_new_tokens ended nothing and stays in the text.
    """
    text = str(tokenizer.decode(response.ids, skip_special_tokens=True))
    if response.ended and sampling.stop_strings:
        return text[: stop_string_start(tokenizer, response.ids, sampling.stop_strings)]
    return text


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    uniforms: Tensor,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    limits: Sequence[int] | None = None,
    max_live_rows: int | None = None,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> list[Response]:
    """Sample one response to each prompt.

    Stop tokens and stop strings inside the prompt, or begun in it, end nothing. Log-probabilities and the cumulative
    distribution are float32 whatever the model computes in. All processes must call this for a sharded model, each with
    its own prompts, also one that has none. Raises ConfigError if the model does not support `sampling.decoder`.

    Args:
        model: a causal language model or an encoder-decoder.
        prompts: B lists of token ids, none empty.
        uniforms: [B, R] in [0, 1); R is the maximum response length.
        sampling: temperature, filters and stops. `Sampling()` is the model's own distribution.
        tokenizer: needed only for stop strings.
        limits: the maximum length of each response, 1 to R; None: R for all.
        max_live_rows: maximum responses decoded at the same time, None for all. Waiting prompts take the place of
            finished responses. This bounds the memory of keys and values and changes no response.
        on_tokens: called after each step with the newest token of each live row. A finished row may stay for some
            steps, and its tokens of these steps belong to no response.
    """
    if not prompts:
        join_sampling(model)
        return []
    device = device_of(model)
    num_rows, longest = uniforms.shape
    each = limits or [longest] * num_rows
    longest_text = max(len(prompt) + limit for prompt, limit in zip(prompts, each, strict=True))
    decoder = choose_decoder(model, longest_text, sampling.decoder)
    max_live_rows = min(max_live_rows or num_rows, num_rows)
    groups = decoder.apart(max_live_rows) if on_tokens is None and not is_large(model) else [lambda: decoder]
    wide = len(groups) == 1 and is_large(model, weights=SHARED_STEP)
    uniforms = uniforms.to(device)
    ends = [num_rows * (number + 1) // len(groups) for number in range(len(groups))]
    tasks = []
    for new, first, last in zip(groups, [0, *ends], ends, strict=False):
        new_rows = partial(_LiveRows, uniforms[first:last], each[first:last], sampling, tokenizer)
        room = max_live_rows // len(groups)
        tasks.append(partial(_decode, new, new_rows, prompts[first:last], room, on_tokens))
    responses = list(chain.from_iterable(in_threads(tasks, wide=wide)))
    join_sampling(model)
    return responses


@torch.no_grad()
def _decode(
    new_decoder: Callable[[], Decoder],
    new_rows: Callable[[], _LiveRows],
    prompts: Sequence[Sequence[int]],
    max_live_rows: int,
    on_tokens: Callable[[Tensor], None] | None,
) -> list[Response]:
    """One response to each prompt; see `sample`. After a lack of memory `in_threads` calls it again."""
    decoder, live, num_started = new_decoder(), new_rows(), 0
    while num_started < len(prompts) or len(live.rows) > 0:
        # 1. The next token's logits: of the live rows, then of the prompts that enter now.
        count = len(live.rows)
        parts = [decoder.step(live.new_ids)] if count > 0 else []
        room, waits = max_live_rows - count, num_started < len(prompts)
        if count == 0 or (waits and decoder.admits_beside_others and room >= REFILL * max_live_rows):
            entering = prompts[num_started : num_started + room]
            parts.append(decoder.admit(entering))
            live.enter(num_started, entering)
            num_started += len(entering)
        logits = (parts[0] if len(parts) == 1 else torch.cat(parts)).float()  # [live rows, V]

        # 2. One token for each live row.
        live.draw(logits)
        if on_tokens is not None:
            on_tokens(live.new_ids)

        # 3. Finished rows leave once the decoder gains by it, and if prompts wait once half are finished.
        count = len(live.rows)
        makes_room = num_started < len(prompts) and 2 * live.num_over >= count
        if live.num_over > 0 and (live.is_full or makes_room or decoder.leave(count, count - live.num_over)):
            decoder.keep(live.drop_finished())
    return live.responses()


class _LiveRows:
    """The tokens drawn so far, and the state of the rows that the decoder is working on.

    Buffers hold all B rows end to end, R places per row. The tokens of a finished row that stays beside the others for
    some steps go to the places behind its end and are ignored. A row at its last possible place leaves.
    """

    def __init__(
        self, uniforms: Tensor, limits: Sequence[int], sampling: Sampling, tokenizer: PreTrainedTokenizerBase | None
    ):
        self.sampling, self.tokenizer = sampling, tokenizer
        self.num_rows, self.width = uniforms.shape
        self.limits = torch.tensor(limits, device=uniforms.device)
        self.uniforms = uniforms.flatten()  # [B * R], like the three buffers below
        self.ids = torch.zeros(self.uniforms.shape, dtype=torch.int64, device=uniforms.device)
        self.logprobs = torch.zeros(self.uniforms.shape, device=uniforms.device)
        self.ended_mask = torch.zeros(self.uniforms.shape, dtype=torch.bool, device=uniforms.device)
        self.allowed_ids: list[list[array[int]]] = [[] for _ in range(self.num_rows)]
        self.forbidden_ids: list[list[list[int]]] = [[] for _ in range(self.num_rows)]
        self.ngrams: list[NGrams] = []  # of each row that has entered, for no_repeat_ngram_size
        self.drawn_ids: list[list[int]] = [[] for _ in range(self.num_rows)]  # for stop strings
        # Per live row: its number, the place of its next token, the place of its last possible token, its newest token.
        empty = torch.zeros(0, dtype=torch.int64, device=uniforms.device)
        self.rows, self.at, self.last, self.new_ids = empty, empty, empty, empty
        self.over_mask = torch.zeros(0, dtype=torch.bool, device=uniforms.device)
        self.num_drawn = 0  # tokens of the youngest live row
        self.num_over = 0  # finished rows among the live ones
        self.is_full = False
        """One of them has drawn all the tokens it may. It must leave: the model may have no more positions."""
        self.stop_mask: Tensor | None = None  # [V]

    def enter(self, first: int, prompts: Sequence[Sequence[int]]) -> None:
        """Add a row for each prompt behind the live ones. The first of them has the number `first`."""
        count = len(prompts)
        rows = torch.arange(first, first + count, device=self.rows.device)
        self.rows, self.at = torch.cat([self.rows, rows]), torch.cat([self.at, rows * self.width])
        self.last = torch.cat([self.last, rows * self.width + self.limits[rows] - 1])
        self.over_mask = torch.cat([self.over_mask, self.over_mask.new_zeros(count)])
        self.num_drawn = 0
        if self.sampling.no_repeat_ngram_size is not None:
            self.ngrams += [NGrams(self.sampling.no_repeat_ngram_size, prompt) for prompt in prompts]

    def _allowed(self, logits: Tensor, stop_mask: Tensor) -> Tensor:
        """The logits [live rows, V] with -inf at tokens that may not be drawn now."""
        sampling = self.sampling
        self.num_drawn += 1
        if self.num_drawn < sampling.min_new_tokens:
            early_mask = self.at % self.width + 1 < sampling.min_new_tokens
            logits = logits.masked_fill(early_mask[:, None] & stop_mask, -math.inf)
        if sampling.no_repeat_ngram_size is not None:
            logits = self._without_repeats(logits)
        if sampling.filters:
            kept_mask = kept_tokens(logits / sampling.temperature, sampling)
            logits = logits.masked_fill(~kept_mask, -math.inf)
            kept_ids = kept_mask.nonzero()[:, 1].int().cpu().split(kept_mask.sum(1).tolist())
            for row, ids in zip(self.rows.tolist(), kept_ids, strict=True):
                self.allowed_ids[row].append(array("i", ids.numpy().tobytes()))
        return logits

    def _without_repeats(self, logits: Tensor) -> Tensor:
        """The logits with -inf at tokens that would repeat an n-gram; unchanged in a row that would keep no token."""
        rows = self.rows.tolist()
        repeated = [self.ngrams[row].repeated() for row in rows]
        without = logits.masked_fill(ids_mask(repeated, logits), -math.inf)
        stuck_mask = without.amax(1) == -math.inf
        for row, ids, is_stuck in zip(rows, repeated, stuck_mask.tolist(), strict=True):
            self.forbidden_ids[row].append([] if is_stuck else ids)
        return torch.where(stuck_mask[:, None], logits, without)

    def draw(self, logits: Tensor) -> None:
        """Draw the next token of each live row from its logits [live rows, V] and note which rows it ends."""
        if self.stop_mask is None:
            self.stop_mask = stop_token_mask(logits.shape[1], self.sampling.stop, logits.device)
        logits = self._allowed(logits, self.stop_mask)
        draw_next, note = _without_python(logits.shape[1], self.sampling.temperature, logits.device.type)
        self.new_ids, logprobs, stopped_mask = draw_next(logits, self.uniforms, self.at, self.stop_mask)
        if self.sampling.stop_strings:
            self._find_stop_strings(stopped_mask)
        if self.ngrams:
            for row, token in zip(self.rows.tolist(), self.new_ids.tolist(), strict=True):
                self.ngrams[row].add(token)
        buffers, live = (self.ids, self.logprobs, self.ended_mask), (self.at, self.last, self.over_mask)
        self.at, self.over_mask, counts = note(*buffers, *live, self.new_ids, logprobs, stopped_mask)
        self.num_over, num_full = counts.tolist()
        self.is_full = num_full > 0

    def _find_stop_strings(self, stopped_mask: Tensor) -> None:
        """Set `stopped_mask` for each row whose newest token completes a stop string."""
        assert self.tokenizer is not None
        strings, live = self.sampling.stop_strings, (~self.over_mask).nonzero()[:, 0]
        for i, row, token in zip(live.tolist(), self.rows[live].tolist(), self.new_ids[live].tolist(), strict=True):
            ids = self.drawn_ids[row]
            ids.append(token)
            if len(ids) >= self.sampling.min_new_tokens and stop_string_start(self.tokenizer, ids, strings) is not None:
                stopped_mask[i] = True

    def drop_finished(self) -> Tensor:
        """Drop the finished rows; returns the indices of the others among the live ones."""
        stay = (~self.over_mask).nonzero()[:, 0]
        self.rows, self.at, self.last = self.rows[stay], self.at[stay], self.last[stay]
        self.new_ids, self.over_mask = self.new_ids[stay], self.over_mask[stay]
        return stay

    def responses(self) -> list[Response]:
        """The finished responses, in the order of the prompts."""
        shape = (self.num_rows, self.width)
        ended_mask = self.ended_mask.view(shape)  # [B, R]
        ended = ended_mask.any(1)
        lengths = torch.where(ended, ended_mask.int().argmax(1) + 1, self.limits).tolist()
        filters = self.sampling.filters
        allowed = self.allowed_ids if filters else [None] * self.num_rows
        repeats = self.sampling.no_repeat_ngram_size is not None and not filters
        forbidden = self.forbidden_ids if repeats else [None] * self.num_rows
        columns = self.ids.view(shape).tolist(), self.logprobs.view(shape).tolist(), ended.tolist(), allowed, forbidden
        return [
            Response(ids[:n], logprobs[:n], end, may and may[:n], may_not and may_not[:n])
            for n, ids, logprobs, end, may, may_not in zip(lengths, *columns, strict=True)
        ]


def _note(
    ids: Tensor,
    logprobs: Tensor,
    ended_mask: Tensor,
    at: Tensor,
    last: Tensor,
    over_mask: Tensor,
    new_ids: Tensor,
    new_logprobs: Tensor,
    stopped_mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the newest tokens into the buffers; return next places, which rows are over, and counts: over, full."""
    ids.scatter_(0, at, new_ids)
    logprobs.scatter_(0, at, new_logprobs)
    ended_mask.scatter_(0, at, stopped_mask)
    full_mask = at >= last
    over_mask = over_mask | stopped_mask | full_mask
    return at + 1, over_mask, torch.stack([over_mask.sum(), full_mask.sum()])


@functools.lru_cache(8)
def _without_python(
    vocabulary: int, temperature: float, device: str
) -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """The function that draws a token for each live row, and `_note`; on a CPU recorded as graphs if possible."""

    def drawing(logits: Tensor, uniforms: Tensor, at: Tensor, stop_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, logprobs = draw(logits, uniforms.gather(0, at), temperature)
        return ids, logprobs, stop_mask.index_select(0, ids)

    if device != "cpu":
        return drawing, _note

    def example(rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        logits, at = (torch.arange(1.0 * rows * vocabulary) % 7).view(rows, -1), torch.arange(rows) * 2
        uniforms, stop_mask = torch.arange(2.0 * rows) / (2 * rows), torch.arange(vocabulary) % 2 == 0
        given = (logits, uniforms, at, stop_mask)
        buffers = torch.zeros(2 * rows, dtype=torch.int64), torch.zeros(2 * rows), torch.zeros(2 * rows).bool()
        return given, (*buffers, at, at + at % 3, at % 4 == 0, *drawing(*given))

    draws, notes = zip(example(3), example(5), strict=True)
    return recorded(drawing, *draws) or drawing, recorded(_note, *notes) or _note


def draw(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw tokens from softmax(logits / temperature) by inverse CDF; return their ids and log-probabilities.

    ``id = the first token whose cumulative probability is above u``
    ``logprob = logits[id] / temperature - logsumexp(logits / temperature)``

    logits [B, V], u [B] in [0, 1) -> ids [B], logprobs [B]. A token of probability 0 is never drawn. The cumulative
    sum runs over blocks of tokens, then over the tokens of one block: over all it takes as long as their exponentials.

    >>> logits = torch.tensor([[1.0, 0.0, 3.0]]).log()  # odds 1 : 0 : 3
    >>> [draw(logits, torch.tensor([u]), 1.0)[0].item() for u in (0.0, 0.24, 0.25, 0.99)]
    [0, 0, 2, 2]
    """
    logits = logits.float()
    top = logits.amax(1, keepdim=True)
    # Odds against the likeliest token. exp2 because torch takes exp from MKL, which is slow on other processors than
    # Intel's. Of whole blocks, because torch computes the last few numbers of a tensor with other last digits.
    missing = -logits.shape[1] % BLOCK
    whole = F.pad(logits, (0, missing), value=-math.inf) if missing else logits
    odds = (whole - top).mul_(1 / (math.log(2) * temperature)).exp2_()  # [B, V + missing]
    blocks = odds.view(-1, whole.shape[1] // BLOCK, BLOCK)
    block, u, total = _invert(blocks.sum(2), u[:, None].float())
    index, _, _ = _invert(blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0], u)
    # NaN odds select the last block, whose end may lie beyond the vocabulary.
    ids = (block * BLOCK + index).clamp_max_(logits.shape[1] - 1)
    logprobs = (logits.gather(1, ids) - top) / temperature - total.log()
    return ids[:, 0], logprobs[:, 0]


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the first column whose cumulative weight exceeds u times the total, place of u within its weight, total weight).

    weights [B, n], u [B, 1] in [0, 1) -> [B, 1] each. A column of weight 0 is never selected.
    """
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    target = u.clamp_max(BELOW_1) * total
    index = torch.searchsorted(sums, target, right=True).clamp_max_(weights.shape[1] - 1)
    weight = weights.gather(1, index)
    if weights.device.type != "cpu":
        # A GPU sums in its own order, so sums that should be equal can differ by a rounding error.
        index = torch.where(weight > 0, index, weights.argmax(1, keepdim=True))
        weight = weights.gather(1, index)
    within = (target - sums.gather(1, index)).div_(weight).add_(1.0)
    return index, within.clamp_(0.0, BELOW_1), total


# ------------------------------------------------------------- filters, and the distribution that they leave


def kept_tokens(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens top_k, top_p and min_p keep: [B, V] bool, at least one per row.

    scaled [B, V] is float32, already divided by the temperature; -inf is never kept. top_p is a share of what top_k
    kept. Among equally likely tokens the lowest ids are kept, on every device.

    >>> scaled = torch.tensor([[1.0, 5.0, 3.0, 1.0]]).log()
    >>> kept_tokens(scaled, Sampling(top_k=3))
    tensor([[ True,  True,  True, False]])
    >>> kept_tokens(scaled, Sampling(top_p=0.6))  # 5/10 is below 0.6, (5 + 3)/10 reaches it
    tensor([[False,  True,  True, False]])
    >>> kept_tokens(scaled, Sampling(top_k=2, top_p=0.6))  # 5/8 reaches it
    tensor([[False,  True, False, False]])
    >>> kept_tokens(scaled, Sampling(min_p=0.5))
    tensor([[False,  True,  True, False]])
    """
    kept_mask = scaled > -math.inf
    if sampling.top_k is not None or (sampling.top_p is not None and sampling.top_p < 1):
        last, count = _last_kept(scaled, sampling.top_k, sampling.top_p)
        above, tied = scaled > last, scaled == last
        kept_mask &= above | (tied & (tied.cumsum(1) <= count - above.sum(1, keepdim=True)))
    if sampling.min_p is not None:
        kept_mask &= scaled >= scaled.amax(1, keepdim=True) + math.log(sampling.min_p)
    return kept_mask


def _last_kept(scaled: Tensor, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor]:
    """The scaled logit of the least likely kept token, and the number of kept tokens: [B, 1] each."""
    vocabulary = scaled.shape[1]
    width = min(FIRST_LOOK if top_k is None else top_k, vocabulary)
    while True:
        ordered = scaled.topk(width, dim=1).values
        count = torch.full_like(ordered[:, :1], width, dtype=torch.int64)
        if top_p is None:
            break
        total = (scaled if top_k is None else ordered).logsumexp(1, keepdim=True)
        mass = (ordered - total).exp().cumsum(1)
        count = (mass < top_p).sum(1, keepdim=True) + 1
        if top_k is not None or width == vocabulary or bool((count <= width).all()):
            count = count.clamp_max(width)
            break
        width = min(8 * width, vocabulary)
    return ordered.gather(1, count - 1), count


class NGrams:
    """The n-grams of a sequence of tokens that grows.

    >>> ngrams = NGrams(2, [5, 6, 7, 5])
    >>> ngrams.repeated()  # (5, 6) exists
    [6]
    >>> ngrams.add(8)
    >>> ngrams.add(5)
    >>> ngrams.repeated()
    [6, 8]
    """

    def __init__(self, size: int, ids: Sequence[int]):
        self._last: deque[int] = deque(maxlen=size - 1)
        self._size = size
        self._followers: dict[tuple[int, ...], set[int]] = {}
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the sequence."""
        if len(self._last) == self._size - 1:
            self._followers.setdefault(tuple(self._last), set()).add(token)
        self._last.append(token)

    def repeated(self) -> list[int]:
        """The tokens that would complete an n-gram that the sequence contains, in ascending order."""
        return sorted(self._followers.get(tuple(self._last), ()))


def stop_token_mask(vocabulary: int, stop: frozenset[int], device: torch.device) -> Tensor:
    """[V] bool, True on the stop tokens; ids beyond the logits' columns are skipped."""
    ids = torch.tensor(sorted(i for i in stop if i < vocabulary), dtype=torch.int64, device=device)
    return torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill(0, ids, True)


def ids_mask(rows: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """[N, V] bool on the device of `like` [N, V], True at the token ids of each row.

    >>> ids_mask([[0, 2], []], torch.zeros(2, 3))
    tensor([[ True, False,  True],
            [False, False, False]])
    """
    assert len(rows) == len(like), "every token has its ids"
    row = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(ids) for ids in rows]))
    mask = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    mask[row.to(like.device), end_to_end(rows, like.device)] = True
    return mask


def allowed_logits(logits: Tensor, responses: Sequence[Response], sampling: Sampling) -> Tensor:
    """The logits with -inf at every token that could not have been drawn.

    With a filter: ``logits[n, v] if v in allowed_ids[n] else -inf``.
    Without one: ``-inf if v in forbidden_ids[n] or (v in stop and t + 1 < min_new_tokens) else logits[n, v]``, where t
    is the token's index in its response.

    For the policy that sampled, ``token_logprobs(allowed_logits(...), ids, temperature=sampling.temperature)`` equals
    `Response.logprobs`. Every other model gets the filter as it was at sampling; it is not computed from new logits.

    logits [sum of R_b, V] before the temperature, one row per response token, end to end -> the same shape; `logits`
    itself if nothing is restricted. The gradient is 0 at -inf.

    >>> response = Response(ids=[2], logprobs=[0.0], ended=False, allowed_ids=[[0, 2]])
    >>> allowed_logits(torch.tensor([[1.0, 2.0, 3.0]]), [response], Sampling(top_k=2))
    tensor([[1., -inf, 3.]])
    >>> response = Response(ids=[0, 2], logprobs=[0.0, 0.0], ended=True)
    >>> sampling = Sampling(min_new_tokens=2, stop=frozenset({2}))
    >>> allowed_logits(torch.zeros(2, 3), [response], sampling)
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """
    if not responses:
        return logits
    if sampling.filters:
        allowed = [ids for response in responses for ids in response.allowed_ids or ()]
        return logits.masked_fill(~ids_mask(allowed, logits), -math.inf)
    if sampling.min_new_tokens > 1 and sampling.stop:
        early = [t + 1 < sampling.min_new_tokens for response in responses for t in range(len(response.ids))]
        early_mask = torch.tensor(early, device=logits.device)[:, None]
        stop_mask = stop_token_mask(logits.shape[1], sampling.stop, logits.device)
        logits = logits.masked_fill(early_mask & stop_mask, -math.inf)
    if sampling.no_repeat_ngram_size is not None:
        forbidden = [ids for response in responses for ids in response.forbidden_ids or ()]
        logits = logits.masked_fill(ids_mask(forbidden, logits), -math.inf)
    return logits


# --------------------------------------------- stop strings: texts that end a response, searched in its decoded tokens


MARGIN = 8
"""Characters at the start of a decoded tail that may differ from the same characters of the full text: the tokenizer
may strip or add a space there, or the tail may begin inside a multi-byte character."""


def stop_string_start(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: Sequence[str]) -> int | None:
    """The index in the decoded ids at which the stop string begins that the last token completes, or None.

    If the last token completes several, the one that begins first counts. The text of the last token is whatever
    differs from the text decoded without it, so a token that adds only the last byte of a character counts too.

    Only a tail of the ids is decoded. It doubles until it shows enough text before the last token, because one token
    can decode to nothing or to 20 characters.
    """
    longest = max(map(len, stop_strings))
    width = longest + MARGIN
    while width < len(ids):
        text, new = _text_and_new(tokenizer, ids[-width:])
        # A tail that begins inside a character decodes to leading U+FFFD. They are not reliable text.
        if new - (len(text) - len(text.lstrip("\ufffd"))) >= longest + MARGIN:
            if _first_ending_after(text, new, stop_strings) is None:
                return None
            break
        width *= 2
    text, new = _text_and_new(tokenizer, ids)
    return _first_ending_after(text, new, stop_strings)


def _text_and_new(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, int]:
    """The decoded ids, and the index of the first character that the last token added."""
    before, text = (str(tokenizer.decode(some, skip_special_tokens=True)) for some in (ids[:-1], ids))
    differs = (i for i, (old, now) in enumerate(zip(before, text, strict=False)) if old != now)
    return text, next(differs, min(len(before), len(text)))


def _first_ending_after(text: str, new: int, stop_strings: Sequence[str]) -> int | None:
    """The smallest start among the stop strings that end after character `new`."""
    starts = [text.find(string, max(0, new - len(string) + 1)) for string in stop_strings]
    return min((start for start in starts if start >= 0), default=None)
