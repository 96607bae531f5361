"""Prompts to sampled responses, with their log-probabilities.

The randomness is a table of uniforms given from outside, one row a prompt, one column a token: a token is
drawn by inverting the cumulative distribution at its uniform. A response therefore depends on its prompt and
its row only, and not on what else is in the batch.

A filter (top_k, top_p, min_p) and min_new_tokens make another distribution of the model's own, and the trainer
has to speak of that one. So a response remembers which tokens each of its own could have been, and
`allowed_logits` takes all others out of whatever logits it is given, those of the policy that has moved on and
of ref_policy too. DeepSeek-V3.2 (2025) keeps its sampling mask for the same reason: ratio and KL are taken
between distributions over the same tokens, and a filter alone never makes them anything but 1 and 0.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.decoders.cpu import FastDecoder, NotFastError, fast_decoder
from rlhf_cli.decoders.gpu import StaticDecoder, static_decoder
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.seeding import generator

REFILL = 0.25
"""Prompts wait until so large a share of max_live_rows is free: to read many together costs less a prompt."""
BLOCK = 64
"""Tokens whose odds a draw adds up first."""
BELOW_1 = 1 - 2.0**-23
"""Times any float32 it is less than that, which 1 - 2**-24, the largest uniform, is not."""
FIRST_LOOK = 1024
"""top_p orders this many of the likeliest tokens and more only where they don't reach p: to order a whole
vocabulary of 150,000 takes 20 times as long, and almost always for tokens that are left out."""
MARGIN = 8
"""Characters at the start of a decoded tail that may differ from the same place in the whole text: a space that
the tokenizer strips or glues, and the rest of a multi-byte character."""


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn.

    The order is: the temperature; min_new_tokens takes the stop tokens out; top_k; top_p of what top_k left,
    renormalised; min_p. What is left is renormalised and drawn from.
    """

    temperature: float = 1.0
    """Above 0; logits are divided by it. 1 is the model itself."""
    top_k: int | None = None
    """Keep the k likeliest tokens, at least 1 (Fan et al. 2018). Of equally likely ones the lower ids go first,
    so 1 is greedy."""
    top_p: float | None = None
    """Above 0; keep the smallest set of likeliest tokens whose probability reaches p, the token that crosses
    included (Holtzman et al. 2020). 1 keeps all."""
    min_p: float | None = None
    """Keep tokens of at least min_p times the likeliest one's probability (Nguyen et al. 2024), from above 0
    to 1."""
    min_new_tokens: int = 0
    """A response that ends has at least this many tokens, the one that ends it included: stop tokens can't be
    drawn before, and a stop string that is complete before ends nothing."""
    stop: frozenset[int] = frozenset()
    """Token ids that end a response: EOS and others."""
    stop_strings: tuple[str, ...] = ()
    """Texts, none empty, that end a response; the token that completes one is its last. They are looked for in
    the response as it is decoded without special tokens: one that is a special token belongs into `stop`."""

    @property
    def filters(self) -> bool:
        """Is anything left out for being unlikely?"""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1) or self.min_p is not None

    @property
    def restricts(self) -> bool:
        """Are there tokens that can't be drawn: left out for being unlikely, or stop tokens for coming too early?"""
        return self.filters or (self.min_new_tokens > 1 and bool(self.stop))


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    ids: list[int]
    """Its tokens, the stop token, or those of the stop string, included when it came."""
    logprobs: list[float]
    """Of each token when it was drawn: of the distribution that it was drawn from, tempered and filtered."""
    ended: bool
    """A stop token or a stop string came before `max_new_tokens` were out."""
    kept: list[list[int]] | None = None
    """With a filter: for each token, the ids that it could have been, in ascending order."""


def uniforms(seed: int, purpose: str, iteration: int, rows: int, columns: int) -> Tensor:
    """The table [rows, columns] of one iteration, in [0, 1), the same on every device."""
    return torch.rand(rows, columns, generator=generator(seed, purpose, iteration))


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends a response: the tokenizer's EOS and all of generation_config's."""
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(found) if isinstance(found, list | tuple) else {found}
    return {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    table: Tensor,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_live_rows: int | None = None,
) -> list[Response]:
    """Sample one response to each prompt.

    prompts: token ids, none empty. table [B, R]: uniforms, R the longest response. Log-probabilities and
    the cumulative distribution are float32 whatever the model computes in. The plain `Sampling()` is the
    model's own distribution: nothing is filtered. Stop tokens and strings in the prompt, or begun in it, end
    nothing.

    At most `max_live_rows` responses are drawn at a time, None for all at once: where some have ended, prompts
    that wait take their place. It bounds the memory of keys and values and changes no response; a step of many
    rows costs less a row, so it is no faster on a CPU. On a GPU it may be fewer (static_decoder.py).

    Raises ValueError: stop strings without the tokenizer to read them with.
    """
    if sampling.stop_strings and tokenizer is None:
        raise ValueError(f"stop_strings {sampling.stop_strings} need the tokenizer: a response is read to find them")
    device = next(model.parameters()).device
    num_rows, longest = table.shape
    decoder = _decoder(model, max(map(len, prompts)) + longest, min(max_live_rows or num_rows, num_rows))
    max_live_rows = min(max_live_rows or num_rows, decoder.most_rows)

    # What was drawn, row after row in one line, with a place behind each row. `rows` are the numbers of the decoder's
    # live rows, `at` the place of the next token of each, `last` that of its last, `over` whether it has ended: it may
    # go on beside the others for a while, for nothing, and what it draws beyond `last` goes to the place behind.
    width = longest + 1
    u = F.pad(table.to(device), (0, 1)).flatten()
    tokens = torch.zeros(u.shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(u.shape, device=device)
    stops = torch.zeros(u.shape, dtype=torch.bool, device=device)
    kept: list[list[list[int]]] = [[] for _ in prompts]
    to_read: list[list[int]] = [[] for _ in prompts]
    rows = at = last = new = torch.zeros(0, dtype=torch.int64, device=device)
    over = torch.zeros(0, dtype=torch.bool, device=device)
    counts: deque[_Count] = deque()
    num_begun = youngest = 0
    is_stop: Tensor | None = None

    while num_begun < num_rows or len(rows) > 0:
        # 1. The logits of the next token: of live rows, and of prompts that take the place of rows that have left.
        parts = [decoder.step(new)] if len(rows) > 0 else []
        room = min(max_live_rows - len(rows), num_rows - num_begun)
        if len(rows) == 0 or (decoder.admits_beside_others and 0 < room >= REFILL * max_live_rows):
            parts.append(decoder.admit(prompts[num_begun : num_begun + room]))
            begun = torch.arange(num_begun, num_begun + room, device=device)
            rows, at = torch.cat([rows, begun]), torch.cat([at, begun * width])
            last = torch.cat([last, begun * width + longest - 1])
            over = torch.cat([over, over.new_zeros(room)])
            num_begun, youngest = num_begun + room, 0
        logits = (parts[0] if len(parts) == 1 else torch.cat(parts)).float()
        if is_stop is None:
            is_stop = _is_stop(logits.shape[1], sampling.stop, device)

        # 2. What may be drawn, and the draw.
        youngest += 1
        if youngest < sampling.min_new_tokens:
            early = at % width + 1 < sampling.min_new_tokens
            logits = logits.masked_fill(early[:, None] & is_stop, -math.inf)
        if sampling.filters:
            allowed = kept_tokens(logits / sampling.temperature, sampling)
            logits = logits.masked_fill(~allowed, -math.inf)
            each = allowed.nonzero()[:, 1].cpu().split(allowed.sum(1).tolist())
            for row, allowed_ids in zip(rows.tolist(), each, strict=True):
                kept[row].append(allowed_ids.tolist())
        new, new_logprobs = draw(logits, u.gather(0, at), sampling.temperature)
        tokens.scatter_(0, at, new)
        logprobs.scatter_(0, at, new_logprobs)

        # 3. What ends, and leaves.
        stopped = is_stop.index_select(0, new)
        if tokenizer is not None and sampling.stop_strings:
            live = (~over).nonzero()[:, 0]
            for i, row, token in zip(live.tolist(), rows[live].tolist(), new[live].tolist(), strict=True):
                to_read[row].append(token)
                may_end = len(to_read[row]) >= sampling.min_new_tokens
                if may_end and stop_string_start(tokenizer, to_read[row], sampling.stop_strings) is not None:
                    stopped[i] = True
        stops.scatter_(0, at, stopped)
        over = over | stopped | (at >= last)
        at = torch.minimum(at, last) + 1
        counts.append(_Count(over))
        if len(counts) <= decoder.lag:
            continue
        num_alive = len(over) - counts.popleft().read()
        if num_alive < len(over) and num_alive <= decoder.leaves_below * len(over):
            stay = (~over).nonzero()[:, 0]
            decoder.keep(stay)
            rows, at, last, new, over = rows[stay], at[stay], last[stay], new[stay], over[stay]
            counts.clear()

    stops = stops.view(num_rows, width)[:, :longest]
    ended = stops.any(1)
    lengths = torch.where(ended, stops.int().argmax(1) + 1, longest).tolist()
    rows_of_tokens, rows_of_logprobs = (
        tokens.view(num_rows, width).tolist(),
        logprobs.view(num_rows, width).tolist(),
    )
    return [
        Response(ids[:n], some[:n], end, allowed_ids[:n] if sampling.filters else None)
        for ids, some, end, allowed_ids, n in zip(
            rows_of_tokens, rows_of_logprobs, ended.tolist(), kept, lengths, strict=True
        )
    ]


class _Count:
    """How many rows are over, asked for now and read later: a GPU is not waited for in between."""

    def __init__(self, over: Tensor):
        self.number = over.sum().to("cpu", non_blocking=True)
        self.is_there = torch.cuda.Event() if over.device.type == "cuda" else None
        if self.is_there is not None:
            self.is_there.record()

    def read(self) -> int:
        if self.is_there is not None:
            self.is_there.synchronize()
        return int(self.number)


def _decoder(model: PreTrainedModel, longest: int, rows: int) -> FastDecoder | StaticDecoder | PlainDecoder:
    """What gives the logits of at most `rows` rows of `longest` tokens: a fast tier where it is the model."""
    try:
        return _fast(model, longest, rows)
    except NotFastError:
        return PlainDecoder(model)


def _fast(model: PreTrainedModel, longest: int, rows: int) -> FastDecoder | StaticDecoder:
    """The fast tier of the model's device. Raises NotFastError."""
    if next(model.parameters()).device.type == "cuda":
        return static_decoder(model, longest, rows)
    return fast_decoder(model, longest)


def why_not_fast(model: PreTrainedModel, longest: int = 1) -> str | None:
    """None where rows of `longest` tokens are sampled by a fast tier, else a line for the user that says why not."""
    try:
        _fast(model, longest, 1)
    except NotFastError as reason:
        return f"{type(model).__name__}: {reason}; it samples through its own forward, which is slower and as exact"
    return None


def draw(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens drawn from softmax(logits / temperature) by inverse CDF, and their log-probabilities.

    logits [B, V], u [B] in [0, 1) -> ids [B], logprobs [B]. The token is the first whose cumulative
    probability is above u, so one of probability 0 is never drawn. The sum is taken over blocks of tokens first,
    and over the tokens of the one block that has the token: a cumulative sum over all of them takes as long as
    their exponentials.

    >>> logits = torch.tensor([[1.0, 0.0, 3.0]]).log()  # odds 1 : 0 : 3
    >>> [draw(logits, torch.tensor([u]), 1.0)[0].item() for u in (0.0, 0.24, 0.25, 0.99)]
    [0, 0, 2, 2]
    """
    logits = logits.float()
    top = logits.amax(1, keepdim=True)
    # Odds against the likeliest token. By powers of two, for torch takes exp from MKL, at a quarter of the speed.
    odds = (logits - top).mul_(1 / (math.log(2) * temperature)).exp2_()
    if odds.shape[1] % BLOCK > 0:
        odds = F.pad(odds, (0, -odds.shape[1] % BLOCK))
    blocks = odds.view(len(odds), -1, BLOCK)
    block, u, total = _invert(blocks.sum(2), u[:, None].float())
    index, _, _ = _invert(blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0], u)
    # Of odds that are no numbers the last block comes out, which can end behind the vocabulary.
    ids = (block * BLOCK + index).clamp_max_(logits.shape[1] - 1)
    logprobs = (logits.gather(1, ids) - top) / temperature - total.log()
    return ids[:, 0], logprobs[:, 0]


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first column whose cumulative weight is above u times the total, where in it u falls, and the total.

    weights [B, n], u [B, 1] in [0, 1) -> [B, 1] each. No column of weight 0 is found.
    """
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    target = u.clamp_max(BELOW_1) * total
    index = torch.searchsorted(sums, target, right=True).clamp_max_(weights.shape[1] - 1)
    weight = weights.gather(1, index)
    if weights.device.type != "cpu":
        # A GPU adds in an order of its own, so its sums can wobble by a rounding where they should be level.
        index = torch.where(weight > 0, index, weights.argmax(1, keepdim=True))
        weight = weights.gather(1, index)
    within = (target - sums.gather(1, index)).div_(weight).add_(1.0)
    return index, within.clamp_(0.0, BELOW_1), total


# ---------------------------------------------------------------------------------- what could be drawn


def kept_tokens(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens top_k, top_p and min_p leave: [B, V] bool, at least one a row.

    scaled [B, V]: float32, after the temperature; -inf is never kept. top_p is the share of what top_k left.
    Equally likely tokens are taken in the order of their ids, whatever device orders them.

    >>> scaled = torch.tensor([[1.0, 5.0, 3.0, 1.0]]).log()
    >>> kept_tokens(scaled, Sampling(top_k=3))
    tensor([[ True,  True,  True, False]])
    >>> kept_tokens(scaled, Sampling(top_p=0.6))  # 5/10, and 8/10 is the first to reach it
    tensor([[False,  True,  True, False]])
    >>> kept_tokens(scaled, Sampling(top_k=2, top_p=0.6))  # 5/8
    tensor([[False,  True, False, False]])
    >>> kept_tokens(scaled, Sampling(min_p=0.5))
    tensor([[False,  True,  True, False]])
    """
    keep = scaled > -math.inf
    if sampling.top_k is not None or (sampling.top_p is not None and sampling.top_p < 1):
        last, count = _last_kept(scaled, sampling.top_k, sampling.top_p)
        above, level = scaled > last, scaled == last
        keep &= above | (level & (level.cumsum(1) <= count - above.sum(1, keepdim=True)))
    if sampling.min_p is not None:
        keep &= scaled >= scaled.amax(1, keepdim=True) + math.log(sampling.min_p)
    return keep


def _last_kept(scaled: Tensor, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor]:
    """The scaled logit of the least likely token that is kept, and how many are kept: [B, 1] each."""
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


def _is_stop(vocabulary: int, stop: frozenset[int], device: torch.device) -> Tensor:
    """[V] bool, True on the stop tokens; ids that the logits have no column for are left out."""
    ids = torch.tensor(sorted(i for i in stop if i < vocabulary), dtype=torch.int64, device=device)
    return torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill(0, ids, True)


def allowed_logits(logits: Tensor, responses: Sequence[Response], sampling: Sampling) -> Tensor:
    """The logits with everything that could not have been drawn at -inf.

    ``logits[n, v] if v in kept[n] else -inf``, and without a filter
    ``-inf if v in stop and t + 1 < min_new_tokens else logits[n, v]``, t the token's place in its response

    ``token_logprobs(allowed_logits(...), ids, temperature=sampling.temperature)`` is `Response.logprobs` for
    the policy that sampled, and what ratio, KL and entropy are made of for any other: what was kept is what the
    rollout kept, and isn't found anew. Give the same to all of them.

    Args:
        logits: [sum of R_b, V], before the temperature, one row for each response token, end to end.
        responses: B, in the same order.
        sampling: how they were drawn.

    Returns:
        [sum of R_b, V]; logits itself where nothing is restricted. The gradient is 0 at -inf.

    Raises:
        ValueError: there are more or fewer rows of logits than response tokens.

    >>> response = Response(ids=[2], logprobs=[0.0], ended=False, kept=[[0, 2]])
    >>> allowed_logits(torch.tensor([[1.0, 2.0, 3.0]]), [response], Sampling(top_k=2))
    tensor([[1., -inf, 3.]])
    >>> response = Response(ids=[0, 2], logprobs=[0.0, 0.0], ended=True)
    >>> sampling = Sampling(min_new_tokens=2, stop=frozenset({2}))
    >>> allowed_logits(torch.zeros(2, 3), [response], sampling)
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """
    num_tokens = sum(len(response.ids) for response in responses)
    if num_tokens != len(logits):
        raise ValueError(f"the responses have {num_tokens} tokens but there are {len(logits)} rows of logits")
    if sampling.filters:
        kept = [ids for response in responses for ids in response.kept or ()]
        if len(kept) != num_tokens:
            raise ValueError(
                f"of {num_tokens} response tokens {len(kept)} say what they could have been: not sampled so"
            )
        row = torch.arange(num_tokens).repeat_interleave(torch.tensor([len(ids) for ids in kept]))
        column = torch.tensor(list(itertools.chain.from_iterable(kept)), dtype=torch.int64)
        forbidden = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        forbidden[row.to(logits.device), column.to(logits.device)] = False
        return logits.masked_fill(forbidden, -math.inf)
    if sampling.restricts:
        early = [t + 1 < sampling.min_new_tokens for response in responses for t in range(len(response.ids))]
        is_stop = _is_stop(logits.shape[1], sampling.stop, logits.device)
        return logits.masked_fill(torch.tensor(early, device=logits.device)[:, None] & is_stop, -math.inf)
    return logits


# ----------------------------------------------------------------------------------------- stop strings


def response_text(tokenizer: PreTrainedTokenizerBase, response: Response, sampling: Sampling) -> str:
    """The response as people and reward models read it: without special tokens and without the stop string.

    It is cut before the stop string that ended it, where more than one did before the one that begins first. A
    stop string that was complete before min_new_tokens ended nothing and stays.
    """
    text = str(tokenizer.decode(response.ids, skip_special_tokens=True))
    if response.ended and sampling.stop_strings:
        return text[: stop_string_start(tokenizer, response.ids, sampling.stop_strings)]
    return text


def stop_string_start(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: Sequence[str]) -> int | None:
    """Where in the decoded text of ids the first stop string begins that the last token completes, else None.

    What the last token adds is what differs from the text without it, so a character of which it brings the
    last byte counts, and a stop string that was there before does not. Only a tail is decoded, until that
    shows none: as many tokens as it takes to see what is before the last one, for a token can be no character
    at all or 20.
    """
    longest = max(map(len, stop_strings))
    width = longest + MARGIN
    while width < len(ids):
        text, new = _text_and_new(tokenizer, ids[-width:])
        # A character whose first bytes were left behind is decoded as U+FFFD, and what hangs on it too.
        if new - (len(text) - len(text.lstrip("\ufffd"))) >= longest + MARGIN:
            if _first_ending_after(text, new, stop_strings) is None:
                return None
            break
        width *= 2
    text, new = _text_and_new(tokenizer, ids)
    return _first_ending_after(text, new, stop_strings)


def _text_and_new(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, int]:
    """The text of ids and where in it begins what the last token brought."""
    before, text = (str(tokenizer.decode(some, skip_special_tokens=True)) for some in (ids[:-1], ids))
    differs = (i for i, (old, now) in enumerate(zip(before, text, strict=False)) if old != now)
    return text, next(differs, min(len(before), len(text)))


def _first_ending_after(text: str, new: int, stop_strings: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins that end after `new`."""
    starts = [text.find(string, max(0, new - len(string) + 1)) for string in stop_strings]
    return min((start for start in starts if start >= 0), default=None)
