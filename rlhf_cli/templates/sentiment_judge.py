"""A judge of film-review sentences that is not used in training: `data/sentiment/judge.py:judge`.

It counts words of two small lists, without context or irony. Its purpose is to be independent of the reward model: a
policy that only exploits the reward model's blind spots raises the score and not this.
"""

import re
from typing import Any

WORD = re.compile(r"[a-z'-]+")
GOOD = set(
    WORD.findall("""
    absorbing affecting amazing amusing artful beautiful beautifully best better brilliant captivating charm charming
    clever comedic compelling cool delight delightful delightfully deserves dazzling deft deep elegant emotional
    engaging engrossing enjoy enjoyable entertaining enthralling excellent exciting exhilarating extraordinary
    fantastic fascinating fine finest fresh fun funny gem genuine gentle good gorgeous great gripping hilarious
    heartfelt heartwarming honest imaginative impressive insightful inspired inspiring intelligent intense
    intriguing joy laughs lovely love lively magnificent masterful masterpiece memorable moving original
    perfect pleasure poignant powerful provocative refreshing remarkable rewarding rich riveting romantic
    satisfying sharp sincere smart solid spectacular strong stunning stylish subtle superb surprising
    surprisingly sweet tender terrific thoughtful thrilling touching triumph unforgettable vivid warm warmth
    watchable well wise witty wonderful wonderfully worth
    """)
)
BAD = set(
    WORD.findall("""
    absurd aimless annoying awful awkward bad badly banal bland boring bore cheap cliche cliched cliches clumsy
    cold confused confusing contrived crude cynical dated dead derivative depressing disappointing disappointment
    disaster dreary dull embarrassing empty exploitative fails failed failure fake flat flawed forced forgettable
    formulaic frustrating generic hackneyed heavy-handed hollow inane incoherent inept lack lacking lacks lame
    lifeless lazy mediocre mess minor mindless miss misses muddled never nothing obvious offensive overlong
    painful pointless poor poorly predictable pretentious repetitive ridiculous routine sadly shallow silly
    slow sloppy stale stupid tedious terrible thin tired tiresome trite ugly unfunny uninspired uneven
    unfortunately unnecessary unpleasant unsatisfying waste wasted weak worse worst wrong
    """)
)
NEGATIONS = {"not", "isn't", "doesn't", "no", "never", "neither", "nor", "hardly", "without", "less", "n't"}


def judge(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each sentence, prompt and response together: `good` and `bad`, 1 if it has such a word.

    A good word within three words after a negation counts as a bad one; a negated bad word counts as neither.

    >>> judge(["a warm and"], [" funny film , never dull ."], [{}])
    [{'good': 1.0, 'bad': 0.0}]
    >>> judge(["it is not"], [" very funny ."], [{}])
    [{'good': 0.0, 'bad': 1.0}]
    """
    verdicts = []
    for prompt, response, _ in zip(prompts, responses, rows, strict=True):
        words = WORD.findall((prompt + response).lower())
        good = bad = 0
        for i, word in enumerate(words):
            negated = any(before in NEGATIONS for before in words[max(0, i - 3) : i])
            good += word in GOOD and not negated
            bad += (word in GOOD and negated) or (word in BAD and not negated and word not in NEGATIONS)
        verdicts.append({"good": float(good > 0), "bad": float(bad > 0)})
    return verdicts
