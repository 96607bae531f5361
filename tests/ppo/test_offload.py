"""Frozen models and the moments of AdamW wait on the CPU between phases, and come back bit for bit.

On a CPU a tensor "moves" by being copied, so its address shows where it is. One test is of pinned memory on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.errors import ConfigError, Interrupted
from rlhf_cli.models.load import load_policy
from rlhf_cli.ppo import setup as ppo_setup
from rlhf_cli.report.progress import Display
from rlhf_cli.rollout.offload import Offload
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.optimizer import build_stepper
from support.crash import results
from support.gpu import DEVICES
from support.resume import same, stopping_after
from support.tiny import CPU

BOTH = ["optimizer", "frozen"]


@pytest.fixture
def movable(monkeypatch):
    """Let the CPU count as a device whose tensors can be moved, and record the phases of a run."""
    phases = []
    monkeypatch.setattr(ppo_setup, "leaves", lambda _: True)
    for name in ("sampling", "scoring", "update"):
        plain = getattr(Offload, name)

        def recorded(self, *given, plain=plain, name=name):
            phases.append(name)
            return plain(self, *given)

        monkeypatch.setattr(Offload, name, recorded)
    return phases


def addresses(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_weights_and_moments_move(make_model):
    """Through all phases, twice. A weight that the policy shares stays."""
    policy, frozen = load_policy(str(make_model("llama"))), load_policy(str(make_model("llama")))
    frozen.model.embed_tokens.weight = policy.model.embed_tokens.weight
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    both = ("exp_avg", "exp_avg_sq")
    own = [p for p in frozen.parameters() if p is not policy.model.embed_tokens.weight]
    offload = Offload(CPU, [frozen], [optimizer], shared=[policy])
    shared = policy.model.embed_tokens.weight.data_ptr()

    alive = []  # The address of a tensor that was freed could be given to another.

    def places():
        moved = own, [state[name] for state in optimizer.state.values() for name in both]
        alive.extend(tensor.detach() for tensors in moved for tensor in tensors)
        return tuple(map(addresses, moved))

    on_device = places()
    offload.sampling(policy)
    away = places()
    assert not set(on_device[0] + on_device[1]) & set(away[0] + away[1])
    for _ in range(2):
        offload.scoring()
        assert not set(places()[0]) & set(away[0]), "the frozen weights are back"
        with offload.update():
            assert places()[0] == away[0], "in the memory from which they came, without a copy"
            in_update = places()[1]
        assert not set(places()[1]) & set(in_update), "the moments have left"
        left = places()[1]
        offload.sampling(policy)
        assert places() == (away[0], left), "what is away already is not copied again"
    assert policy.model.embed_tokens.weight.data_ptr() == shared


def test_moments_that_a_resumed_run_reads_leave_the_device(make_model):
    """It has sampled before, to measure SFT: there were none then."""
    policy = load_policy(str(make_model("llama")))
    optimizer = torch.optim.AdamW(policy.parameters())
    offload = Offload(CPU, [], [optimizer], shared=[policy])
    offload.sampling(policy)
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    read = [state["exp_avg"] for state in optimizer.state.values()]
    offload.sampling(policy)
    assert not set(addresses(read)) & set(addresses(state["exp_avg"] for state in optimizer.state.values()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "8bit", "bfloat16"])
def test_steps_with_and_without_offload_give_the_same_bits(make_model, precision, device):
    """Three iterations on the same gradients. What waits is in pinned memory, and its bytes leave the GPU."""
    path, is_gpu = str(make_model("llama")), device == "cuda"
    settings = Optimizer(learning_rate=1e-2, schedule="constant", precision=precision)
    frozen, *policies = (load_policy(path).to(device) for _ in range(3))
    before = [p.detach().clone() for p in frozen.parameters()]
    steppers = [build_stepper(policy, settings, 3) for policy in policies]
    offload = Offload(torch.device(device), [frozen], [steppers[0].optimizer], shared=[policies[0]])

    def moments():
        states = steppers[0].optimizer.state.items()
        return [t for p, state in states for t in state.values() if torch.is_tensor(t) and t.shape == p.shape]

    for step in range(3):
        held = torch.cuda.memory_allocated() if is_gpu else 0
        offload.sampling(policies[0])
        waiting = [*frozen.parameters(), *moments()]
        assert {(tensor.device.type, tensor.is_pinned()) for tensor in waiting} == {("cpu", is_gpu)}
        if is_gpu and step == 0:
            assert held - torch.cuda.memory_allocated() >= sum(p.nbytes for p in frozen.parameters())
        offload.scoring()
        here = list(frozen.parameters())
        assert all(p.device.type == device and torch.equal(p, q) for p, q in zip(here, before, strict=True))
        with offload.update():
            assert {t.device.type for t in moments()} <= {device}
            for stepper in steppers:
                for number, p in enumerate(stepper.model.parameters()):
                    draw = torch.Generator().manual_seed(100 * step + number)
                    p.grad = torch.randn(p.shape, generator=draw).to(device)
                stepper.advance()
    moved, stayed = (list(policy.parameters()) for policy in policies)
    assert moments()
    assert not torch.equal(stayed[0], before[0])
    assert all(torch.equal(p, q) for p, q in zip(moved, stayed, strict=True))


def test_what_a_phase_needs_stays(make_model):
    """A frozen model that is sampled from, and one that the loss of the update runs."""
    frozen = load_policy(str(make_model("llama")))
    offload = Offload(CPU, [frozen], [], update_needs_frozen=True)
    offload.sampling(frozen)
    place = addresses(frozen.parameters())
    with offload.update():
        assert addresses(frozen.parameters()) == place
    offload.sampling(load_policy(str(make_model("llama"))))
    assert not set(addresses(frozen.parameters())) & set(place)


def test_a_run_with_offload_is_the_same_run(run_stage, pipeline, tmp_path, movable, monkeypatch):
    """Weights and metrics, also when it is resumed after the first iteration without offloading."""
    root = pipeline("llama")
    keys = {"policy": {"path": str(root / "sft")}, "rewards": [{"type": "reward_model", "path": str(root / "rm")}]}
    plain = results(run_stage("ppo", tmp_path / "plain", **keys))
    movable.clear()
    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "finish_step", stopping_after(1))
        with pytest.raises(Interrupted):
            run_stage("ppo", tmp_path / "moved", **keys, offload=BOTH)
    # The held-out prompts are measured first. Before and after each update everything else is away.
    assert movable == ["sampling", "scoring", "sampling", "scoring", "update"]
    same(results(run_stage("ppo", tmp_path / "moved", **keys, offload=BOTH)), plain)


def test_offload_without_a_gpu_is_refused_or_said(run_stage, start, base, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="offload does nothing with device: cpu"):
        run_stage("ppo", tmp_path, **base, device="cpu", offload=BOTH)
    notes = []
    monkeypatch.setattr(Display, "note", lambda _, text: notes.append(text))
    with start(offload=["frozen"]) as loaded:
        assert loaded.models.offload is None
    assert "offload: does nothing on this cpu, whose memory holds everything" in notes
