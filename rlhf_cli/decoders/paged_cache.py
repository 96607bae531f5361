"""Keys and values of sequences of many lengths, in pages, and the attention of one new token per row over them.

A page holds PAGE tokens of one sequence, and each row has a list of pages, as in PagedAttention (Kwon et al. 2023,
arXiv 2309.06180). So no padding is stored or read, rows that end return their pages without copying anything, and rows
with the same prompt share its full pages.

On a CPU the attention of one token is two weighted sums of rows of memory. The scores are the sum over d of
``q[d] * keys[d, :]`` if the tokens are the last dimension of the keys. The output is the sum over the tokens of
``p[token] * values[token, :]``. torch's kernel for such sums is embedding_bag. For 64 rows of 30 to 150 tokens it takes
a tenth of the time of scaled_dot_product_attention with a mask, which computes a matrix product for each single query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_cli.kernels.linear import rounded_up

PAGE = 32
"""Tokens per page. On average half of a row's last page is wasted. Smaller pages give shorter sums, which are slower
per token."""

FEWEST_CLEANED = 16
"""Pages that are cleaned together at least. Cleaning one page takes as long."""


class Places(NamedTuple):
    """Where the attention of a step reads and writes, until a row enters, leaves or begins a page.

    A step computes N rows, of which the first B are live. W is the number of pages of the longest row.
    """

    new_keys: Tensor  # where in the pool the keys of the last page of each live row begin [B, kv_heads * D]
    new_values: Tensor  # the first row of D numbers of that page in the pool of values [B, kv_heads]
    filled: Tensor  # the numbers of the (row, head, page) in [N * heads * W] whose row has such a page
    query: Tensor  # for each of these, the number of its query in [N * heads]
    key_rows: Tensor  # for each of these, the D rows of PAGE numbers that hold the keys of the page
    key_ends: Tensor  # where the sum of each (row, head, page) begins in `key_rows`, and where the last one ends
    value_rows: Tensor  # for each (row, head), the rows of D numbers that hold the values of its pages
    value_ends: Tensor  # where the sum of each (row, head) begins in `value_rows`, and where the last one ends
    token_number: Tensor  # [W * PAGE] from 0

    def at(self, position: Tensor) -> Places:
        """The places of a step whose new tokens have these positions [N]: the first two in the slots of the tokens."""
        slot = (position[: self.new_keys.shape[0]] % PAGE)[:, None]
        new_keys, new_values = (self.new_keys + slot).flatten(), (self.new_values + slot).flatten()
        return self._replace(new_keys=new_keys, new_values=new_values)

    def bias(self, position: Tensor) -> Tensor:
        """Added to the scores [N, 1, W * PAGE]: -inf at slots that are not written yet."""
        return torch.where(self.token_number > position[:, None, None], -math.inf, 0.0)


class PagedCache:
    """Keys and values of the live rows; float32 on a CPU.

    `kv_heads` divides `heads`, the number of query heads. Query head h reads key head ``h // (heads / kv_heads)``.
    """

    def __init__(self, num_layers: int, heads: int, kv_heads: int, head_dim: int):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        # The last dimension is the one that a sum reads: tokens in keys, head_dim in values.
        self.keys = [torch.zeros(0, kv_heads, head_dim, PAGE) for _ in range(num_layers)]
        self.values = [torch.zeros(0, kv_heads, PAGE, head_dim) for _ in range(num_layers)]
        self.key_head = torch.arange(heads) // (heads // kv_heads)  # [heads]
        # Pages that no row uses: zeroed ones, and ones with old numbers.
        self.clean: list[int] = []
        self.unused: list[int] = []
        self.users: list[int] = []  # for each page, the number of rows that use it
        # For each live row: its pages in order, and its number of tokens.
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []
        self._places: Places | None = None
        self.fewest_rows = 1
        """A step computes at least this many rows; surplus rows are zeros."""

    def rounded_up(self, rows: int) -> int:
        """The number of rows that a step computes for this many live ones."""
        return max(rounded_up(rows), self.fewest_rows)

    # ------------------------------------------------------------------------------------- rows enter and leave

    def open_rows(self, prompts: Sequence[Sequence[int]], copies: Sequence[Sequence[int]]) -> list[Tensor]:
        """Add rows: for each different prompt those with the numbers `copies`, counted from the first new row.

        They share the prompt's full pages. Each has its own last page, because its response continues there. Returns
        for each prompt the places of its keys and values, for `write_prompts`: [3, n] with the number of a token in the
        prompt, and its page and slot.
        """
        pages: dict[int, list[int]] = {}
        lengths: dict[int, int] = {}
        places = []
        self._reserve(sum(len(prompt) // PAGE + len(rows) for prompt, rows in zip(prompts, copies, strict=True)))
        for prompt, rows in zip(prompts, copies, strict=True):
            full, rest = divmod(len(prompt), PAGE)
            shared = self._take(full, users=len(rows))
            place = [(slot + number * PAGE, page, slot) for number, page in enumerate(shared) for slot in range(PAGE)]
            for row in rows:
                last_page = self._take(1) if rest else []
                place += [(slot + full * PAGE, page, slot) for page in last_page for slot in range(rest)]
                pages[row], lengths[row] = shared + last_page, len(prompt)
            places.append(torch.tensor(place).T)
        self.pages += [pages[row] for row in sorted(pages)]
        self.lengths += [lengths[row] for row in sorted(lengths)]
        self._places = None
        return places

    def write_prompts(self, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
        """Write key, value [N, kv_heads, D] of prompts end to end. `places` [3, n] numbers tokens over all prompts."""
        token, page, slot = places
        self.keys[layer][page, :, :, slot] = key[token]
        self.values[layer][page, :, slot] = value[token]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, and free the pages of the others."""
        staying = set(rows)
        for page in (page for row, pages in enumerate(self.pages) if row not in staying for page in pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                self.unused.append(page)
        self.pages = [self.pages[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self._places = None

    def _take(self, count: int, *, users: int = 1) -> list[int]:
        self._reserve(count)
        taken = [self.clean.pop() for _ in range(count)]
        for page in taken:
            self.users[page] = users
        return taken

    def _reserve(self, count: int) -> None:
        """Make sure that `count` clean pages exist. If too few pages are unused, the pool grows by at least half."""
        if len(self.clean) >= count:
            return
        count = max(count - len(self.clean), FEWEST_CLEANED)
        if len(self.unused) < count:
            old = len(self.users)
            # Twice what is missing: growing again would copy everything, and untouched memory costs nothing.
            more = max(2 * (count - len(self.unused)), old // 2)
            for layers in (self.keys, self.values):
                for layer, pool in enumerate(layers):
                    layers[layer] = pool.new_empty(old + more, *pool.shape[1:])
                    layers[layer][:old] = pool
            self.users += [0] * more
            self.unused += range(old + more - 1, old - 1, -1)
        # Slots that are not written yet are read with weight 0, and 0 * NaN would be NaN.
        cleaned, self.unused = self.unused[-count:], self.unused[:-count]
        index = torch.tensor(cleaned)
        for pool in (*self.keys, *self.values):
            pool.index_fill_(0, index, 0.0)
        self.clean += cleaned

    # ---------------------------------------------------------------------------------------------- one token

    def add_token(self) -> tuple[Tensor, Places]:
        """Make room for one more token in each row; return the tokens' positions [N] and where attention works.

        N is the number of rows, rounded up. The surplus rows have position 0.
        """
        for pages, length in zip(self.pages, self.lengths, strict=True):
            if length == len(pages) * PAGE:
                pages += self._take(1)
                self._places = None
        if self._places is None:
            self._places = self._laid_out()
        surplus = [0] * (self.rounded_up(len(self.lengths)) - len(self.lengths))
        positions = torch.tensor(self.lengths + surplus)
        self.lengths = [length + 1 for length in self.lengths]
        return positions, self._places

    def _laid_out(self) -> Places:
        """Which rows of memory each weighted sum of `attend` reads. Surplus rows have no pages."""
        width = max(map(len, self.pages))
        pages = [number for row in self.pages for number in (*row, *[-1] * (width - len(row)))]
        pages += [-1] * width * (self.rounded_up(len(self.pages)) - len(self.pages))
        # [N * heads * W]: (page, key head) as one number; negative where the row has no such page.
        page_heads = (torch.tensor(pages).view(-1, 1, width) * self.kv_heads + self.key_head[:, None]).flatten()
        exists_mask = page_heads >= 0
        filled = exists_mask.nonzero()[:, 0]
        page_heads = page_heads.index_select(0, filled)[:, None]
        ends = F.pad(exists_mask.cumsum(0), (1, 0))
        heads, size = self.kv_heads, self.head_dim
        last_page = torch.tensor([pages[-1] for pages in self.pages])[:, None]
        return Places(
            new_keys=last_page * (heads * size * PAGE) + torch.arange(heads * size) * PAGE,
            new_values=last_page * (heads * PAGE) + torch.arange(heads) * PAGE,
            filled=filled,
            query=filled // width,
            key_rows=(page_heads * size + torch.arange(size)).flatten(),
            key_ends=ends * size,
            value_rows=(page_heads * PAGE + torch.arange(PAGE)).flatten(),
            value_ends=ends[::width] * PAGE,
            token_number=torch.arange(width * PAGE),
        )


def attend(
    places: Places,
    bias: Tensor,
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
) -> Tensor:
    """Write the new token's key and value, and attend from it to its row.

    keys [pages, kv_heads, D, PAGE] and values [pages, kv_heads, PAGE, D] of a layer; query [N, heads, D], key, value
    [N, kv_heads, D] -> [N, heads * D]. A score is the product of a query and a key, times `scaling`.
    `places` and `bias` are those of the step (`Places.at`).
    """
    num_rows, heads, size = query.shape
    keys.view(-1).scatter_(0, places.new_keys, key.flatten())
    values.view(-1, size).index_copy_(0, places.new_values, value.flatten(0, 1)[: places.new_values.shape[0]])
    weights = query.reshape(-1, size).index_select(0, places.query).flatten()
    scores = _weighted_sums(keys.view(-1, PAGE), places.key_rows, places.key_ends, weights)  # [N * heads * W, PAGE]
    scores = torch.add(bias, scores.view(num_rows, heads, -1), alpha=scaling)  # [N, heads, W * PAGE]
    weights = scores.softmax(2).view(-1, PAGE).index_select(0, places.filled).flatten()
    return _weighted_sums(values.view(-1, size), places.value_rows, places.value_ends, weights).view(num_rows, -1)


def _weighted_sums(rows: Tensor, index: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """``out[n] = sum of weights[i] * rows[index[i]] for i in range(ends[n], ends[n + 1])``, 0 for an empty sum."""
    summed: Tensor = torch.embedding_bag(rows, index, ends, False, 0, False, weights, True)[0]
    return summed
