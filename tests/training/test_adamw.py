"""AdamW against its formula, and its forms that keep less than float32: their steps, their quality, and resuming."""

import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.errors import ConfigError, Interrupted
from rlhf_cli.plan.memory import STATES
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.optimizer import RoundedAdamW, build_stepper, round_stochastically
from support.gpu import DEVICES
from support.resume import stopping_after
from support.worlds import run_in_threads

BFLOAT16 = {"optimizer": {"precision": "bfloat16"}, "precision": "bfloat16"}


def config(**changes):
    return Optimizer.model_validate({"learning_rate": 1e-3, "schedule": "constant", **changes})


def linear(dtype=torch.float32, size=(64, 128), device="cpu"):
    torch.manual_seed(0)
    layer = torch.nn.Linear(*size, bias=False)
    return layer.to(device, dtype)


# --------------------------------------------------------------------------------------------- the formula

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
    settings = config(**{"learning_rate": 0.1, "warmup_steps": 0, "weight_decay": 1.0, **changes})
    model = Layer()
    stepper = build_stepper(model, settings, total_steps=len(GRADIENTS))
    for gradients in GRADIENTS:
        for p in model.parameters():
            p.grad = torch.tensor(gradients).view_as(p).clone()
        stepper.advance()
    for name, p in model.named_parameters():
        decay = settings.weight_decay if name == "linear.weight" else 0.0
        expected = [
            adamw(start, [gradients[i] for gradients in GRADIENTS], settings, weight_decay=decay)
            for i, start in enumerate((3.0, -2.0))
        ]
        assert p.flatten().tolist() == pytest.approx(expected, abs=1e-5), name


def test_a_warm_up_ratio_is_a_share_of_the_steps():
    """It has the rates of the same number of `warmup_steps`, and both together are refused."""

    def rates(**changes):
        stepper, found = build_stepper(linear(), config(learning_rate=0.5, schedule="linear", **changes), 21), []
        for _ in range(21):
            found.append(stepper.learning_rate)
            stepper.advance(move=False)
        return found

    assert rates(warmup_ratio=0.2) == rates(warmup_steps=5)
    assert rates(warmup_ratio=0.0) == rates()
    with pytest.raises(ValueError, match="both set the length of the warm-up"):
        config(warmup_ratio=0.1, warmup_steps=3)


# --------------------------------------------------------------------------------------------- fewer bytes


def test_float32_weights_get_plain_adamw(monkeypatch):
    """Bit for bit, also in chunks and with weight decay."""
    monkeypatch.setattr("rlhf_cli.training.optimizer.CHUNK", 1000)
    plain, ours = linear(), linear()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    reference = torch.optim.AdamW([{"params": plain.parameters(), "weight_decay": 0.1}], fused=True, **settings)
    rounded = RoundedAdamW([{"params": list(ours.parameters()), "weight_decay": 0.1}], seed=0, **settings)
    for step in range(3):
        for model, optimizer in ((plain, reference), (ours, rounded)):
            model.weight.grad = torch.randn(plain.weight.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        assert torch.equal(plain.weight, ours.weight)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "8bit"])
def test_eps_bounds_the_first_step(precision):
    """With every gradient equal to eps the first step is half of the learning rate: g / (|g| + eps)."""
    if precision == "8bit":
        pytest.importorskip("bitsandbytes")
    model = linear()
    before = model.weight.detach().clone()
    stepper = build_stepper(model, config(learning_rate=1e-2, eps=1e-2, precision=precision, max_grad_norm=1e9), 9)
    model.weight.grad = torch.full_like(model.weight, 1e-2)
    stepper.advance()
    torch.testing.assert_close(before - model.weight, torch.full_like(before, 0.5e-2), rtol=2e-2, atol=0)


def test_small_steps_are_kept_on_average():
    """200 steps of 1e-4 from 1.0. Rounded to the nearest bfloat16 number, which is 0.004 away, none would count."""
    model = linear(torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    stepper = build_stepper(model, config(learning_rate=1e-4, precision="bfloat16"), 200)
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        stepper.advance()
    assert {state.dtype for state in stepper.optimizer.state[model.weight].values() if state.ndim} == {torch.bfloat16}
    assert model.weight.float().mean().item() == pytest.approx(1 - 200 * 1e-4, abs=5e-4)


def test_numbers_of_bfloat16_are_not_changed_and_others_go_to_a_neighbour():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    noise = [torch.randint(0, 1 << 16, (1000,), dtype=torch.int32, generator=draw) for _ in range(2)]
    assert torch.equal(round_stochastically(x.bfloat16().float(), noise[0]), x.bfloat16())
    rounded = round_stochastically(x, noise[1]).float()
    assert ((rounded - x).abs() < x.abs() * 2**-7).all()
    assert (rounded > x).any()
    assert (rounded < x).any()
    assert round_stochastically(
        torch.tensor([torch.inf, -torch.inf]), torch.tensor([7, 65535], dtype=torch.int32)
    ).tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bfloat16", "8bit"])
def test_state_returns_from_a_checkpoint_bit_for_bit(precision, device):
    """Four steps at once, and two with a checkpoint after each two."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    settings = config(precision=precision)
    whole, first, second = (build_stepper(linear(dtype, device=device), settings, 4) for _ in range(3))
    draws = [torch.randn(128, 64, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in range(4)]
    for stepper, gradients in ((whole, draws), (first, draws[:2])):
        for gradient in gradients:
            stepper.model.weight.grad = gradient.clone()
            stepper.advance()
    tensors, numbers = first.state()
    saved = {name: tensor.cpu().clone() for name, tensor in tensors.items()}  # as from a file
    second.model.load_state_dict(first.model.state_dict())
    second.restore(saved, numbers)
    for gradient in draws[2:]:
        second.model.weight.grad = gradient.clone()
        second.advance()
    assert torch.equal(second.model.weight, whole.model.weight)
    state, expected = second.state()[0], whole.state()[0]
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("precision", "expected"), [("float32", 12), ("8bit", 6.03), ("bfloat16", 4)])
def test_bytes_of_a_trained_weight(precision, expected):
    """Weight, gradient and moments against the cost model, for a matrix of 1024 x 1024."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = linear(dtype, (1024, 1024))
    stepper = build_stepper(model, config(precision=precision), 1)
    model.weight.grad = torch.ones_like(model.weight)
    stepper.optimizer.step()
    held = [model.weight, model.weight.grad, *stepper.state()[0].values()]
    count = sum(tensor.nbytes for tensor in held) / model.weight.numel() - 4
    assert count == pytest.approx(expected, abs=0.01)
    assert sum(STATES[precision]) - 4 == pytest.approx(expected, abs=0.01)


def test_two_processes_keep_equal_weights(make_model, write_config, run_stage, tmp_path, monkeypatch):
    """Stochastic rounding on two processes: both have the weights of one, up to the rounding of single weights."""
    model = {"path": str(make_model("llama"))}
    kept, save = [], RoundedAdamW.step

    def step(self, closure=None):
        save(self, closure)
        kept.append(torch.cat([p.detach().float().reshape(-1) for g in self.param_groups for p in g["params"]]))

    monkeypatch.setattr(RoundedAdamW, "step", step)
    run_in_threads(2, "sft", write_config("sft", tmp_path / "two", model=model, **BFLOAT16))
    assert len(kept) == 6
    for one, two in zip(kept[::2], kept[1::2], strict=True):
        assert torch.equal(one, two)
    run_stage("sft", tmp_path / "one", model=model, **BFLOAT16)
    differ = (kept[5] != kept[-1]).float().mean()
    assert differ < 0.1
    assert (kept[5] - kept[-1]).abs().max() <= 2**-7 * kept[-1].abs().max()


def test_what_makes_no_sense_is_refused(run_stage, make_model, tmp_path, monkeypatch):
    model = {"path": str(make_model("llama"))}
    lora = {**model, "lora": {"r": 2}}
    for changes, message in (
        ({"optimizer": {"precision": "bfloat16"}}, "precision: auto is float32 on this cpu. Set precision: bfloat16"),
        ({**BFLOAT16, "precision": "float32"}, "needs bfloat16 passes, and precision is float32"),
        ({**BFLOAT16, "model": lora}, r"does nothing with model\.lora"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_stage("sft", tmp_path, **{"model": model, **changes})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"8bit needs the package bitsandbytes \(extra qlora\)\. Install it: "):
        build_stepper(linear(), config(precision="8bit"), 1)


def test_a_checkpoint_of_bfloat16_weights_holds_them_as_they_are(run_stage, make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(StageRun, "finish_step", stopping_after(1))
    with pytest.raises(Interrupted):
        run_stage("sft", tmp_path, model={"path": str(make_model("llama"))}, **BFLOAT16)
    (saved,) = tmp_path.glob(".*/step-*/state.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in load_file(saved).items()}
    assert dtypes["model/model.embed_tokens.weight"] == torch.bfloat16
    assert dtypes["model/model.norm.weight"] == torch.float32
