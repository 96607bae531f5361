"""The sum of the gradients over the processes: right, in the same order everywhere, and begun in the last pass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rlhf_cli.processes import microbatches
from rlhf_cli.processes.distributed import ALONE
from rlhf_cli.processes.microbatches import GradientSum
from support.worlds import ThreadWorld, in_each_process


def model_of(dtype=torch.float32):
    """Two layers and one that no pass uses. The same in every process."""
    draw = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)).to(dtype)
    for weight in layers.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draw))
    return layers


def loss_of(model, rows):
    return model[1](model[0](rows).tanh()).square().sum()


def losses_of(rows, *models):
    """For each model the loss of a piece, the number of one of the `rows`."""
    return [lambda piece, model=model: (loss_of(model, rows[piece]), {}) for model in models]


def sum_of(world, *models):
    return GradientSum(world, lambda loss: loss, *models)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 10**6], ids=["one each", "several", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [True, False])
def test_gradients_are_summed_and_a_missing_one_counts_as_zero(bucket_bytes, dtype, last, monkeypatch):
    """Process 0 makes two passes, process 1 one, process 2 none."""
    monkeypatch.setattr(microbatches, "BUCKET_BYTES", bucket_bytes)
    rows = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    shares = [[0, 1], [2], []]

    def program(world):
        model = model_of(dtype)
        total = sum_of(world, model)
        total.add([[number] for number in shares[world.rank]], *losses_of(rows, model), last=last)
        total.receive()
        return [weight.grad for weight in model.parameters()]

    alone = [model_of(dtype) for _ in shares]
    for model, share in zip(alone, shares, strict=True):
        for number in share:
            loss_of(model, rows[number]).backward()
    for found in in_each_process(3, program):
        for sums, *weights in zip(found, *(model.parameters() for model in alone), strict=True):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
            # The sum is computed in float32. That of a few bfloat16 numbers of similar size is exact.
            wanted = torch.stack(parts).float().sum(0).to(dtype)
            torch.testing.assert_close(sums, wanted, rtol=1e-6, atol=1e-7)


@dataclass(frozen=True)
class Noting(ThreadWorld):
    """Notes the sums that begin."""

    noted: list[object]

    def start_sum(self, tensor):
        self.noted.append(tensor.numel())
        return super().start_sum(tensor)


def test_sums_begin_in_the_last_pass_and_in_the_same_order_on_every_process(monkeypatch):
    """A process without rows begins all at the end. A layer that no pass uses delays the first of the second model."""
    monkeypatch.setattr(microbatches, "BUCKET_BYTES", 1)

    def program(world):
        world = Noting(world.rank, world.size, world.device, world.meeting, [])
        first, second = model_of()[:2], model_of()
        total = sum_of(world, first, second)

        def last(piece):
            world.noted.append(f"after {piece}")
            return torch.zeros(()), {}

        total.add([[0], [1]] * (1 - world.rank), *losses_of(torch.ones(2, 3), first, second), last)
        total.receive()
        return world.noted

    one, other = in_each_process(2, program)
    assert one == ["after [0]", 2, 8, 4, 12, "after [1]", 2, 4, 2, 8, 4, 12]
    assert other == [2, 8, 4, 12, 2, 4, 2, 8, 4, 12]


def test_a_frozen_weight_is_left_out_and_one_process_sums_nothing():
    def program(world):
        model = model_of()
        model[0].requires_grad_(False)
        total = sum_of(world, model)
        total.add([[0]], *losses_of(torch.ones(1, 3), model))
        total.receive()
        return model[0].weight.grad

    assert in_each_process(2, program) == [None, None]
    model = model_of()
    total = sum_of(ALONE, model)
    total.add([[0]], *losses_of(torch.ones(1, 3), model))
    before = model[0].weight.grad
    total.receive()
    assert model[0].weight.grad is before
    assert model[2].weight.grad is None


def test_a_second_backward_pass_after_the_sums_have_begun_is_refused():
    """Its gradient would be lost."""

    def program(world):
        model = model_of()
        with pytest.raises(RuntimeError, match="second backward pass"):
            sum_of(world, model).add([[0]], *losses_of(torch.ones(1, 3), model, model))

    in_each_process(2, program)
