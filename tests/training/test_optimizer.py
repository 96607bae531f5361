"""AdamW as every stage builds it, compared with its formula written out by hand."""

import math

import pytest
import torch

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.training.optimizer import build_stepper

GRADIENTS = ((0.5, -2.0), (1e-4, 3.0), (-0.2, 0.0), (0.7, 1.0))  # of two weights in four steps


def adamw(weight, gradients, config, *, weight_decay):
    """A weight after AdamW's steps at a constant learning rate (Loshchilov and Hutter 2019, algorithm 2)."""
    first = second = 0.0
    (beta1, beta2), rate = config.betas, config.learning_rate
    for step, gradient in enumerate(gradients, start=1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        unbiased = first / (1 - beta1**step), second / (1 - beta2**step)
        weight -= rate * weight_decay * weight + rate * unbiased[0] / (math.sqrt(unbiased[1]) + config.eps)
    return weight


class Layer(torch.nn.Module):
    """A matrix with a bias, a norm, and the biases of two experts: the kinds of weights of a language model."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(1, 2), torch.nn.LayerNorm(2)
        self.experts_bias = torch.nn.Parameter(torch.empty(2, 1))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.tensor([3.0, -2.0]).view_as(p))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"betas": [0.5, 0.999]},
        {"betas": [0.9, 0.6]},
        {"eps": 0.3},
        {"weight_decay": 0.0},
        {"weight_decay": 2.0, "betas": [0.7, 0.8], "eps": 0.05},
    ],
    ids=str,
)
def test_steps_follow_adamw_and_only_matrices_decay(changes):
    """Biases and the weights of norms do not decay. Every setting of the config changes the result."""
    config = Optimizer.model_validate(
        {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "weight_decay": 1.0, **changes}
    )
    model = Layer()
    stepper = build_stepper(model, config, total_steps=len(GRADIENTS))
    for gradients in GRADIENTS:
        for p in model.parameters():
            p.grad = torch.tensor(gradients).view_as(p).clone()
        stepper.advance()
    for name, p in model.named_parameters():
        decay = config.weight_decay if name == "linear.weight" else 0.0
        expected = [
            adamw(start, [gradients[i] for gradients in GRADIENTS], config, weight_decay=decay)
            for i, start in enumerate((3.0, -2.0))
        ]
        assert p.flatten().tolist() == pytest.approx(expected, abs=1e-5), name


def test_a_warm_up_ratio_is_a_share_of_the_steps():
    """It has the rates of the same number of `warmup_steps`, and both together are refused."""

    def rates(**changes):
        config = Optimizer(learning_rate=0.5, schedule="linear", **changes)
        stepper, found = build_stepper(torch.nn.Linear(2, 2), config, 21), []
        for _ in range(21):
            found.append(stepper.learning_rate)
            stepper.advance(move=False)
        return found

    assert rates(warmup_ratio=0.2) == rates(warmup_steps=5)
    assert rates(warmup_ratio=0.0) == rates()
    with pytest.raises(ValueError, match="both set the length of the warm-up"):
        Optimizer(learning_rate=1, warmup_ratio=0.1, warmup_steps=3)
