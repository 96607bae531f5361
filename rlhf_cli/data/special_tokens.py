"""Text from data is text: special tokens in it are encoded as the characters that they are.

A tokenizer reads the text `<eos>` as its EOS token wherever it occurs. In a row that would teach a model to stop in
the middle of an answer, or let a user's message forge a message of the system. Special tokens that a chat template or
`data.prompt_template` writes must stay special. So a row's text is encoded in three steps:

    protect    replace each special token in the row's own text by a mark that no text can contain
    render     the template, which passes marks through
    encode     a special token is one of the template's now; each mark becomes its token's characters again

A text without a mark goes to the tokenizer unchanged, so rows without special tokens keep their usual ids.
"""

from __future__ import annotations

import functools
import re
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from tokenizers import AddedToken, Tokenizer

from rlhf_cli.data.paths import reason
from rlhf_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGE, STAND_IN = ("".join(chr(0x10F000 + byte) for byte in secrets.token_bytes(12)) for _ in range(2))
"""EDGE begins and ends a mark. STAND_IN begins the text that replaces a special token of the template. Both are random
in each process, so data cannot forge them; no token id depends on them."""
NUMBERS = 0x100000
"""The character of this code stands for special token 0 in a mark, the next one for token 1, and so on."""
MARK = re.compile(f"{EDGE}([\U00100000-\U0010efff]?){EDGE}")
"""A mark: a special token's number between two edges, or nothing for a mere boundary."""
BOUNDARY = EDGE + EDGE
NO_TOKEN = 0xEFFF
"""The number of a boundary among the stand-ins."""


class SpecialTokens:
    """The special tokens of a tokenizer, as text and as ids. `special_tokens_of` makes it once for each tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = weakref.ref(tokenizer)
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        special = [content for content, token in added.items() if token.special]
        self.named = tuple(tokenizer.all_special_tokens)
        known = tokenizer.get_vocab()
        self.tokens = [token for token in dict.fromkeys([*self.named, *special]) if token and token in known]
        self.ids = [known[token] for token in self.tokens]
        self._added = [added.get(token, AddedToken(token)) for token in self.tokens]
        self._number = {token: number for number, token in enumerate(self.tokens)}
        # The longest first: one token may begin with another.
        self._pattern = re.compile("|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True))) or "(?!)")
        self._longest = max(map(len, self.tokens), default=0)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Only a weak reference is kept, so that the cache of this class does not keep it alive."""
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        return tokenizer

    @functools.cached_property
    def appends_eos(self) -> bool:
        """Does the tokenizer end every text with EOS?"""
        return self.encode(["a"], add_special_tokens=True)[0][-1:] == [self.tokenizer.eos_token_id]

    def first_in(self, texts: Iterable[str]) -> str | None:
        """The first special token that occurs in the texts, or None."""
        matches = (self._pattern.search(text) for text in texts)
        return next((match[0] for match in matches if match is not None), None)

    def protect(self, text: str) -> str:
        """A row's own text with a mark in place of each special token."""
        return self._pattern.sub(lambda match: f"{EDGE}{chr(NUMBERS + self._number[match[0]])}{EDGE}", text)

    def join(self, before: str, after: str) -> str:
        """The two texts together, with a boundary between them if a special token would arise where they meet."""
        window = before[len(before) - self._longest + 1 :] if len(before) >= self._longest else before
        meets = len(window)
        for match in self._pattern.finditer(window + after[: self._longest - 1]):
            if match.start() < meets < match.end():
                return before + BOUNDARY + after
        return before + after

    def protect_within(self, rendered: str, own_texts: Iterable[str]) -> str:
        """A rendered text with marks in the `own_texts` of a row.

        If a template changed such a text, so that it is not found, every special token of the rendered text is marked.
        """
        for core in (own.strip() for own in own_texts if self.first_in([own]) is not None):
            if core not in rendered:
                return self.protect(rendered)
            rendered = rendered.replace(core, self.protect(core))
        return rendered

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_length: int | None = None,
        side: Literal["left", "right"] = "left",
    ) -> list[list[int]]:
        """The ids of rendered texts. A text longer than `max_length` is cut at `side`.

        Raises DataError for a special token that the tokenizer makes even of its separate characters.
        """
        usual = [text for text in texts if EDGE not in text]
        encoded: list[list[int]] = []
        if max_length is not None:
            self.tokenizer.truncation_side = side
        try:
            if usual:
                encoded = self.tokenizer(
                    usual,
                    add_special_tokens=add_special_tokens,
                    truncation=max_length is not None,
                    max_length=max_length,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    verbose=False,
                )["input_ids"]
        except BaseException as error:
            # A pattern of the tokenizer that gives up on a text ends in a panic of Rust, which is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"the tokenizer fails on a text ({reason(error)}). Correct tokenizer.json") from None
        if max_length is not None and self.tokenizer.is_fast:
            self.tokenizer.backend_tokenizer.no_truncation()  # a saved tokenizer would keep it
        rest = map(list, encoded)
        split = functools.partial(self._split, add_special_tokens=add_special_tokens, max_length=max_length, side=side)
        return [split(text) if EDGE in text else next(rest) for text in texts]

    def _split(self, text: str, add_special_tokens: bool, max_length: int | None, side: str) -> list[int]:
        # Models with a vocabulary of whole words or of pieces know the token's text: cut it in two. A tokenizer in
        # Python (of few models, such as ByT5) reads no marks.
        for separate in (False, True) if self.tokenizer.is_fast else ():
            before, ids, after = self._parts(text, add_special_tokens, separate=separate)
            if not self._makes_special(text, ids):
                break
        else:
            token = next((self._marked(match) for match in MARK.finditer(text) if match[1]), "a special token")
            found = f"the text contains {token!r}, which this tokenizer cannot read as plain text"
            raise DataError(f"{found}. Remove it from the data, or set data.special_tokens: keep")
        if max_length is not None:
            room = max(0, max_length - len(before) - len(after))
            ids = ids[:room] if side == "right" else ids[max(0, len(ids) - room) :]
        return [*before, *ids, *after]

    def _makes_special(self, text: str, ids: Sequence[int]) -> bool:
        """Do `ids` have more special tokens than the template wrote into `text`, unknown characters aside?"""
        special = {*self.ids} - {self.tokenizer.unk_token_id}
        written = [self.ids[self._number[match[0]]] for match in self._pattern.finditer(text)]
        return sum(i in special for i in ids) > sum(i in special for i in written)

    def _parts(self, text: str, add_special_tokens: bool, *, separate: bool) -> tuple[list[int], list[int], list[int]]:
        """(tokens that the tokenizer adds before, the text's, those added after). `separate` cuts marked tokens."""
        backend = self._backend
        # As the usual tokenizer does, but with ordinary added tokens in place of the template's special tokens.
        replaced = self._pattern.sub(lambda match: _stand_in(self._number[match[0]]), text)
        cut = _stand_in(NO_TOKEN) if separate else ""
        plain = MARK.sub(lambda match: self._marked(match)[:1] + cut + self._marked(match)[1:], replaced)
        encoding = backend.encode(plain, add_special_tokens=add_special_tokens)
        mask = encoding.special_tokens_mask
        start = next((n for n, added in enumerate(mask) if not added), len(mask))
        end = max((n + 1 for n, added in enumerate(mask) if not added), default=start)
        real = {backend.token_to_id(_stand_in(number)): i for number, i in enumerate(self.ids)}
        boundary = backend.token_to_id(_stand_in(NO_TOKEN))
        body = [real.get(i, i) for i in encoding.ids[start:end] if i != boundary]
        return encoding.ids[:start], body, encoding.ids[end:]

    def _marked(self, match: re.Match[str]) -> str:
        """The special token of a mark; "" for a boundary."""
        return self.tokens[ord(match[1]) - NUMBERS] if match[1] else ""

    @functools.cached_property
    def _backend(self) -> Tokenizer:
        """A copy of the tokenizer that reads special tokens as text, and an ordinary added token in place of each."""
        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        stand_ins = [AddedToken(_stand_in(NO_TOKEN), normalized=False)]
        for number, token in enumerate(self._added):
            edges = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            stand_ins.append(AddedToken(_stand_in(number), normalized=False, **edges))
        backend.add_tokens(stand_ins)
        backend.encode_special_tokens = True
        return backend


def _stand_in(number: int) -> str:
    """The text that stands for a special token of the template, or for a boundary."""
    return STAND_IN + chr(NUMBERS + number)


_KNOWN: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, SpecialTokens] = weakref.WeakKeyDictionary()


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    found = _KNOWN.get(tokenizer)
    if found is None or found.named != tuple(tokenizer.all_special_tokens):
        found = _KNOWN[tokenizer] = SpecialTokens(tokenizer)
    return found


def cut_behind_eos(ids: list[int], eos: int) -> list[int]:
    """The ids up to their last EOS, if at most two tokens follow it.

    ChatML writes a newline behind EOS. A response of PPO ends with EOS, so every stage reads up to there.

    >>> cut_behind_eos([5, 6, 2, 9], eos=2), cut_behind_eos([5, 2, 6, 7, 8], eos=2)
    ([5, 6, 2], [5, 2, 6, 7, 8])
    """
    for end in range(len(ids), max(0, len(ids) - 3), -1):
        if ids[end - 1] == eos:
            return ids[:end]
    return ids
