"""What the headers of *.safetensors files say. Does not import torch."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path

NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""The number formats of safetensors, by the names of torch."""
LARGEST_HEADER = 100_000_000
"""The library's own limit, in bytes."""


def stored_dtype(folder: str | Path) -> str | None:
    """The number format of most numbers in the *.safetensors files of a folder, such as `bfloat16`.

    None without such a file, or if its header cannot be read.
    """
    numbers: Counter[str] = Counter()
    try:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, LARGEST_HEADER)))
            for name, tensor in header.items():
                if name != "__metadata__":
                    numbers[str(tensor["dtype"])] += math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return None
    if not numbers:
        return None
    most, _ = numbers.most_common(1)[0]
    return NAMES.get(most, most.lower())
