"""The machine's limits, and the minimum work of each phase.

    python benchmarks/speed_limits.py CORES     # 1, or 0,1

measures, on these cores, the best rate of float32 products, the memory bandwidth, and the time that torch needs to
start an operation on an empty tensor. The functions below count the arithmetic and the bytes of the work itself: real
tokens only, the head only where a token is predicted, nothing twice.

Only products are counted, with 2 operations per multiply-add, as usual (Kaplan et al. 2020, section 2.1): norms,
softmax and rotations are negligible. The backward pass costs twice the forward pass.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from speed_inputs import Size

OPERATIONS_PER_LAYER = 10
"""Minimum number of operations per layer and decoding step: norm, QKV, rotation, cache write, attention, output, norm,
gate and up, their product, down."""
OPERATIONS_PER_STEP = 8
"""Operations per decoding step outside the layers: embedding, norm, head, and choosing a token."""
FLOAT = 4
"""Bytes per float32 number."""


@dataclass(frozen=True)
class Work:
    """The minimum work of a phase."""

    flops: float = 0.0
    bytes: float = 0.0
    """Bytes moved between memory and processor; counted only in decoding, where they may matter."""
    operations: float = 0.0
    """Calls of torch that cannot be fused; counted only in decoding."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.operations + other.operations)

    def times(self, factor: float) -> "Work":
        return Work(self.flops * factor, self.bytes * factor, self.operations * factor)

    def seconds(self, limits: dict[str, float]) -> dict[str, float]:
        """Seconds of each of the three on a machine with these limits."""
        return {
            "arithmetic": self.flops / limits["flops"],
            "bytes": self.bytes / limits["bandwidth"],
            "dispatch": self.operations * limits["dispatch_s"],
        }


# ------------------------------------------------------------------------------------------- the work


def forward(size: Size, length: int, predicted: int, start: int = 0) -> Work:
    """A forward pass over tokens `start` to `length` of one sequence, with the head on `predicted` positions.

    ``2 * layers * (4 * hidden**2 + 3 * hidden * intermediate)`` per token, less if heads share keys and
    values; ``4 * layers * hidden`` for each token that it attends to, itself included; ``2 * hidden * vocabulary`` per
    prediction.

    >>> tiny = Size(2, 3, 1, 1, 5, ppo_batch=1, steps=1, learning_rate=1.0)
    >>> forward(tiny, 3, 1).flops  # 3 * 2 * (16 + 18), 8 * (1 + 2 + 3), 2 * 2 * 5
    272.0
    >>> (forward(tiny, 2, 0) + forward(tiny, 3, 1, start=2)).flops
    272.0
    """
    own = length - start
    weights = 2.0 * size.layers * weights_per_layer(size) * own
    attention = 4.0 * size.layers * size.hidden * (length * (length + 1) - start * (start + 1)) / 2
    return Work(weights + attention + 2.0 * size.hidden * size.vocabulary * predicted)


def weights_per_layer(size: Size) -> int:
    return 2 * size.hidden * (size.hidden + kv_width(size)) + 3 * size.hidden * size.intermediate


def kv_width(size: Size) -> int:
    """Size of a token's keys in one layer; its values have the same size."""
    return size.hidden * (size.kv_heads or size.heads) // size.heads


def total(works: Sequence[Work]) -> Work:
    return sum(works, Work())


def sft_work(size: Size, batch: Sequence[tuple[int, int]]) -> Work:
    """A training step on rows of (tokens, learned tokens)."""
    return total([forward(size, length, learned) for length, learned in batch]).times(3)


def rm_work(size: Size, batch: Sequence[tuple[int, int, int]]) -> Work:
    """A training step on pairs of (common tokens at the start, tokens of each answer); common tokens count once."""
    parts = [
        forward(size, prefix, 0) + forward(size, a, 0, start=prefix) + forward(size, b, 0, start=prefix)
        for prefix, a, b in batch
    ]
    return total(parts).times(3)


def rollout_work(size: Size, prompts: Sequence[int], responses: Sequence[int], number_bytes: int = FLOAT) -> Work:
    """Sampling: a forward pass over each prompt, then a step per further token, without finished rows.

    A step reads all weights once, and the keys and values of the unfinished rows.
    """
    computed = total([forward(size, p + r - 1, r) for p, r in zip(prompts, responses, strict=True)])
    steps = max(responses)
    weights = number_bytes * (size.layers * weights_per_layer(size) + size.hidden * size.vocabulary) * steps
    read = sum(_sum(p, p + r - 1) for p, r in zip(prompts, responses, strict=True))
    cached = 2 * size.layers * kv_width(size) * number_bytes * read
    return computed + Work(0.0, weights + cached, steps * (OPERATIONS_PER_LAYER * size.layers + OPERATIONS_PER_STEP))


def _sum(first: int, last: int) -> int:
    """
    >>> _sum(3, 5)
    12
    """
    return (first + last) * (last - first + 1) // 2


def scoring_work(size: Size, prompts: Sequence[int], responses: Sequence[int]) -> Work:
    """ref_policy, value model and reward model over prompts and responses; the policy's log-probabilities are known
    from sampling."""
    pairs = list(zip(prompts, responses, strict=True))
    return total([forward(size, p + r, r) + forward(size, p + r, 0).times(2) for p, r in pairs])


def update_work(size: Size, prompts: Sequence[int], responses: Sequence[int], epochs: int) -> Work:
    """Policy and value model, forward and backward, `epochs` times."""
    pairs = list(zip(prompts, responses, strict=True))
    return total([forward(size, p + r, r) + forward(size, p + r, 0) for p, r in pairs]).times(3 * epochs)


# ---------------------------------------------------------------------------------------- the machine


def measure_limits(cores: list[int]) -> dict[str, float]:
    """Run this file in a separate process on these cores."""
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
    command = [sys.executable, __file__, ",".join(map(str, cores))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def best_of(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The highest rates and the shortest time.

    >>> best_of([{"flops": 2.0, "dispatch_s": 0.5}, {"flops": 3.0, "dispatch_s": 0.7}])
    {'flops': 3.0, 'dispatch_s': 0.5}
    """
    return {name: (min if name.endswith("_s") else max)(limits[name] for limits in measured) for name in measured[0]}


def measure() -> dict[str, float]:
    """Measure each limit: the best of several tries."""
    import torch

    def rate(amount: float, call: Callable[[], Any], seconds: float = 0.6) -> float:
        best, until = float("inf"), time.perf_counter() + seconds
        call()
        while time.perf_counter() < until:
            began = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - began)
        return amount / best

    onednn = torch.ops.mkldnn._linear_pointwise
    found = {"mkl_flops": 0.0, "onednn_flops": 0.0}
    for n in (512, 1024, 2048):
        a, b = torch.randn(n, n), torch.randn(n, n)
        found["mkl_flops"] = max(found["mkl_flops"], rate(2 * n**3, lambda a=a, b=b: torch.mm(a, b)))
        found["onednn_flops"] = max(
            found["onednn_flops"], rate(2 * n**3, lambda a=a, b=b: onednn(a, b, None, "none", [], ""))
        )
    found["flops"] = max(found.values())
    big, other = torch.zeros(2**26), torch.ones(2**26)
    found["bandwidth"] = max(
        rate(big.numel() * FLOAT * 2, lambda: big.copy_(other)), rate(big.numel() * FLOAT, lambda: other.sum())
    )
    tiny = torch.zeros(1)

    def thousand() -> None:
        for _ in range(1000):
            tiny.add_(1.0)

    with torch.inference_mode():
        found["dispatch_s"] = 1.0 / rate(1000, thousand, 0.3)
    return found


def main() -> None:
    cores = [int(core) for core in sys.argv[1].split(",")]
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
