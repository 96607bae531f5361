"""Random generators that are derived, not carried: each draw has its own.

A generator is seeded from (seed, purpose, counters). So step 700 draws the same numbers whether or not steps 1 to 699
ran in this process, and no random state is saved or restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit number that depends on every argument."""
    text = "\0".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """A CPU generator for one draw. It gives the same numbers on every device and process."""
    import torch  # here, so that `derived_seed` costs no import of torch

    return torch.Generator().manual_seed(derived_seed(seed, purpose, *counters))


@contextmanager
def seeded(seed: int, purpose: str, *counters: int) -> Iterator[None]:
    """Within this context torch's global CPU generator is seeded, for library code that draws from it (weight init)."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, purpose, *counters))
        yield
