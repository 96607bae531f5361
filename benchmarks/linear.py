"""Compare MKL and oneDNN: float32 products of a linear layer, forward and backward, on one core.

    python benchmarks/linear.py

Prints GFLOPS, best of 20, for the shapes of small models' layers: [rows, in] by [out, in]. The last line says which of
the two `rlhf_cli.kernels.linear` uses on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rlhf_cli.kernels.linear import _product, prefers_onednn
from rlhf_cli.processes.environment import set_up_process

SHAPES = [(64, 128, 384), (1400, 128, 128), (1400, 128, 344), (700, 128, 2048), (1400, 512, 1376), (700, 512, 8192)]


def gflops(product: Callable[[], torch.Tensor], operations: int) -> float:
    """GFLOPS of the best of 20 calls."""
    product()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return operations / best / 1e9


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'rows x in x out':>20} {'MKL':>18} {'oneDNN':>18}   (forward, input's gradient, weight's gradient)")
    for rows, inside, outside in SHAPES:
        x, weight, grad = torch.randn(rows, inside), torch.randn(outside, inside), torch.randn(rows, outside)
        pairs = [(x, weight), (grad, weight.t()), (grad.t(), x.t())]
        operations = 2 * rows * inside * outside
        by_mkl = [gflops(lambda a=a, b=b: a @ b.t(), operations) for a, b in pairs]
        by_onednn = [gflops(lambda a=a, b=b: _product(a, b, None), operations) for a, b in pairs]
        cells = " ".join(f"{' '.join(f'{x:5.0f}' for x in found):>18}" for found in (by_mkl, by_onednn))
        print(f"{rows:>6} x {inside:>4} x {outside:>4} {cells}")
    print(f"used here: {'oneDNN' if prefers_onednn() else 'MKL'}")


if __name__ == "__main__":
    set_up_process()
    main()
