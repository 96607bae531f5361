"""The distribution that tokens are drawn from: temperature, filters, repeated n-grams, min_new_tokens.

A filter changes the distribution that tokens are drawn from, and ratio, KL and entropy must use that distribution.
Each response therefore stores the ids that each of its tokens was drawn from, or the few that were forbidden.
`allowed_logits` masks all other ids in any logits: those of the policy after an update, and those of ref_policy.
DeepSeek-V3.2 (2025) keeps its sampling mask for the same reason. Ratio and KL then compare distributions over the same
tokens, so a filter alone leaves the ratio at 1 and the KL at 0.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.config.ppo import DecoderName

FIRST_LOOK = 1024
"""top_p first orders this many of the likeliest tokens, and more only if their probability does not reach p. Ordering
a whole vocabulary of 150,000 takes 20 times as long, and almost all of those tokens are filtered out anyway."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    The steps, in order: divide the logits by the temperature; forbid stop tokens before min_new_tokens; forbid tokens
    that would repeat an n-gram; keep top_k; keep top_p of the renormalised rest; keep min_p. The remaining
    probabilities are renormalised.
    """

    temperature: float = 1.0
    """Above 0; divides the logits. 1 is the model's own distribution."""
    top_k: int | None = None
    """Keep the k likeliest tokens, at least 1 (Fan et al. 2018). Among equally likely tokens the lowest ids are kept,
    so 1 is greedy decoding."""
    top_p: float | None = None
    """Nucleus sampling, above 0: keep the smallest set of likeliest tokens whose probability reaches p, including the
    token that crosses it (Holtzman et al. 2020). 1 keeps all tokens."""
    min_p: float | None = None
    """Keep tokens with at least min_p times the probability of the likeliest one (Nguyen et al. 2024). Above 0, at
    most 1."""
    no_repeat_ngram_size: int | None = None
    """Forbid each token that would complete a sequence of this many tokens that the prompt and the response already
    contain, at least 1 (Paulus et al. 2017). Where that would forbid every token, it forbids none."""
    min_new_tokens: int = 0
    """Minimum length of a response that ends, including its last token. Stop tokens cannot be drawn before, and a stop
    string that is complete before ends nothing."""
    stop: frozenset[int] = frozenset()
    """Token ids that end a response: EOS and others."""
    stop_strings: tuple[str, ...] = ()
    """Texts, none empty, that end a response. The token that completes one is the response's last. They are searched
    in the text decoded without special tokens, so list a special token in `stop` instead."""
    decoder: DecoderName = "auto"
    """Which decoder computes the logits (`rollout.decoder`). The decoders differ by rounding only."""

    @property
    def filters(self) -> bool:
        """Whether any token is filtered out for its low probability."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1) or self.min_p is not None

    @property
    def restricts(self) -> bool:
        """Whether any token cannot be drawn: a filter, a repeated n-gram, or a stop token that would come too early."""
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
    allowed_ids: list[list[int]] | None = None
    """With a filter: the ids that each token was drawn from, in ascending order. None without a filter."""
    forbidden_ids: list[list[int]] | None = None
    """With `no_repeat_ngram_size` and no filter: the ids that would have repeated an n-gram at each token. None
    otherwise."""


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
    row = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(ids) for ids in rows]))
    column = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int64)
    mask = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    mask[row.to(like.device), column.to(like.device)] = True
    return mask


def allowed_logits(logits: Tensor, responses: Sequence[Response], sampling: Sampling) -> Tensor:
    """The logits with -inf at every token that could not have been drawn.

    With a filter: ``logits[n, v] if v in allowed_ids[n] else -inf``.
    Without one: ``-inf if v in forbidden_ids[n] or (v in stop and t + 1 < min_new_tokens) else logits[n, v]``, where t
    is the token's index in its response.

    For the policy that sampled, ``token_logprobs(allowed_logits(...), ids, temperature=sampling.temperature)`` equals
    `Response.logprobs`. Use the same responses for every other model: the filter is applied as it was at sampling and
    is not computed again from the new logits.

    Args:
        logits: [sum of R_b, V], before the temperature, one row per response token, end to end.
        responses: B, in the same order.
        sampling: how they were drawn.

    Returns:
        [sum of R_b, V]; `logits` itself if nothing is restricted. The gradient is 0 at -inf.

    Raises:
        ValueError: the number of rows of logits is not the number of response tokens.

    >>> response = Response(ids=[2], logprobs=[0.0], ended=False, allowed_ids=[[0, 2]])
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
        raise ValueError(f"found {len(logits)} rows of logits for {num_tokens} response tokens")
    if not responses:
        return logits
    if sampling.filters:
        allowed = _stored([r.allowed_ids for r in responses], "allowed_ids", num_tokens)
        return logits.masked_fill(~ids_mask(allowed, logits), -math.inf)
    if sampling.min_new_tokens > 1 and sampling.stop:
        early = [t + 1 < sampling.min_new_tokens for response in responses for t in range(len(response.ids))]
        early_mask = torch.tensor(early, device=logits.device)[:, None]
        stop_mask = stop_token_mask(logits.shape[1], sampling.stop, logits.device)
        logits = logits.masked_fill(early_mask & stop_mask, -math.inf)
    if sampling.no_repeat_ngram_size is not None:
        forbidden = _stored([r.forbidden_ids for r in responses], "forbidden_ids", num_tokens)
        logits = logits.masked_fill(ids_mask(forbidden, logits), -math.inf)
    return logits


def _stored(ids_of_responses: Sequence[list[list[int]] | None], name: str, num_tokens: int) -> list[list[int]]:
    """The ids stored for each token of the responses, end to end; raises ValueError if some are missing."""
    ids = [row for rows in ids_of_responses for row in rows or ()]
    if len(ids) != num_tokens:
        raise ValueError(
            f"found {name} for {len(ids)} of {num_tokens} response tokens: the responses were not sampled with this "
            "filter"
        )
    return ids
