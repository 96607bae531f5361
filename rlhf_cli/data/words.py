"""Words of a text, also in scripts that write no spaces between them."""

from __future__ import annotations

import re

SPACELESS = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
"""The characters of scripts without spaces between words, for a character class."""
_RUNS = re.compile(rf"([{SPACELESS}]+)|[^\W{SPACELESS}]+")
_SPACELESS = re.compile(f"[{SPACELESS}]")
CLOSING = ".!?,;)]}\"'\u2026\u201d\u2019"
"""Punctuation that a space follows. A colon is not among them: `Answer:` may precede an answer directly."""


def words(text: str) -> frozenset[str]:
    """The set of lower-case words of a text; the text itself if it has none.

    Of scripts without spaces each pair of neighbouring characters counts as a word.

    >>> sorted(words("What is the TIME, what time?"))
    ['is', 'the', 'time', 'what']
    >>> sorted(words("GPT是什么")) == sorted(["gpt", "是什", "什么"])
    True
    """
    found: set[str] = set()
    for match in _RUNS.finditer(text.casefold()):
        run = match[0]
        found |= {run} if match[1] is None or len(run) == 1 else {run[n : n + 2] for n in range(len(run) - 1)}
    return frozenset(found or [text.strip()])


def glued(prompt: str, answer: str) -> str | None:
    """The two words where a prompt and its answer meet, if a space is missing between them; else None.

    >>> glued("What is a weatherman.", "He tells the weather.")
    'weatherman.He'
    >>> glued("1+1=", "2"), glued("Answer:", "It is late"), glued("天气怎么样？", "很好")
    (None, None, None)
    """
    last, first = prompt[-1:], answer[:1]
    if not first.isalnum() or not (last.isalnum() or (last and last in CLOSING)):
        return None
    if _SPACELESS.match(last) or _SPACELESS.match(first):
        return None
    return prompt[-40:].split()[-1] + answer[:40].split()[0]
