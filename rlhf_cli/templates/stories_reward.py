"""Two rewards for stories, written as Python functions: `data/stories/reward.py:kindness` and `:dialogue`.

A reward function is called with the prompts, the responses and the prompts' rows, each a list of the same length,
and returns a number for each response. `row["ended"]` is false if the response was cut at its maximum length; its last
word may then be incomplete and is not counted.

Both are bounded, and both deduct points for repetition: without that a policy finds "happy happy happy" within a few
iterations.
"""

import itertools
import re
from typing import Any

KIND = {
    "happy": ("happy", "happily", "happier"),
    "smile": ("smile", "smiled", "smiles", "smiling"),
    "love": ("love", "loved", "loves", "loving"),
    "laugh": ("laugh", "laughed", "laughing"),
    "hug": ("hug", "hugged", "hugs"),
    "friend": ("friend", "friends", "friendly"),
    "kind": ("kind", "kindly", "kindness"),
    "share": ("share", "shared", "sharing"),
    "thank": ("thank", "thanked", "thanks", "thankful"),
    "help": ("help", "helped", "helping", "helpful"),
    "glad": ("glad", "gladly"),
    "proud": ("proud", "proudly"),
    "gentle": ("gentle", "gently"),
    "together": ("together",),
    "fun": ("fun",),
    "care": ("care", "careful", "cared", "caring"),
}
STEM = {form: stem for stem, forms in KIND.items() for form in forms}
MOST = 4
"""Maximum number of different kind words that count."""
REPEAT_COST = 3.0
"""Deduction for a response that is all repetition; proportional for less."""


def words_of(text: str, ended: bool) -> list[str]:
    """The words in lower case; a cut text loses its last word if it stops inside it."""
    words = re.findall(r"[a-z']+", text.lower())
    return words if ended or not text[-1:].isalpha() else words[:-1]


def repeated(words: list[str]) -> float:
    """The share of word pairs that occurred before in the same text, 0 to 1."""
    pairs = list(itertools.pairwise(words))
    return 1.0 - len(set(pairs)) / len(pairs) if pairs else 0.0


def kindness(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """The number of different kind words in a story, 0 to 4, minus 3 times its share of repeated word pairs.

    >>> cut = [{"ended": False}]
    >>> kindness([""], [" They smiled and shared the cake. They were happ"], cut)
    [2.0]
    >>> round(kindness([""], [" happy happy happy happy happy"], [{"ended": True}])[0], 2)
    -1.25
    """
    scores = []
    for _, response, row in zip(prompts, responses, rows, strict=True):
        words = words_of(response, row["ended"])
        stems = {STEM[word] for word in words if word in STEM}
        scores.append(min(len(stems), MOST) - REPEAT_COST * repeated(words))
    return scores


def dialogue(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1 for each closed quotation of two words or more, 0 to 3, minus the same deduction for repetition.

    >>> dialogue([""], [' Tom said, "Let us play." "No," said Ben. "Do not'], [{"ended": False}])
    [1.0]
    """
    scores = []
    for _, response, row in zip(prompts, responses, rows, strict=True):
        spoken = {text.lower() for text in re.findall(r'"([^"]+)"', response) if len(text.split()) > 1}
        scores.append(min(len(spoken), 3) - REPEAT_COST * repeated(words_of(response, row["ended"])))
    return scores
