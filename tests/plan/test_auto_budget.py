"""`tokens_per_microbatch: auto`: by hand, and the same in a run and in its plan."""

from __future__ import annotations

import contextlib

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.kernels.head import CACHED
from rlhf_cli.models import cost
from rlhf_cli.models.cost import CPU_TOKENS
from rlhf_cli.plan import budget as budget_module
from rlhf_cli.plan import memory, stages
from rlhf_cli.plan.activations import activation_bytes
from rlhf_cli.plan.budget import FEWEST_TOKENS, GPU_TOKENS, SHARE_OF_CPU, SHARE_OF_GPU, forward_budget
from rlhf_cli.plan.fit import plan_of
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.stages import microbatch_tokens, models_of, planned_tokens, setting_of
from rlhf_cli.processes.distributed import World
from stages import ppo, rm, sft
from support.tiny import CPU, llama, merged

GB = 1024**3
LIBRARIES = memory.LIBRARIES["float32"]
HEAD_CHUNK = 4 * CACHED[0]
"""The logits that the head computes at a time, for a small vocabulary."""


def test_activation_bytes_equal_the_formula():
    model = llama()
    wanted = 4 * 3 * (7 * 64 + 2 * 32 + 4 * 176)
    state = torch.get_rng_state()
    assert activation_bytes(model, "float32") == pytest.approx(wanted, rel=0.1)
    assert activation_bytes(model, "float32") == activation_bytes(model, "float32")
    assert torch.equal(state, torch.get_rng_state())
    assert activation_bytes(llama(num_hidden_layers=6), "float32") == pytest.approx(2 * wanted, rel=0.1)
    assert activation_bytes(model, "bfloat16") < 0.8 * wanted
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------------------------------- by hand


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """A function: model, bytes of the machine, further arguments -> the tokens that `auto` chooses in its stage."""

    def choose(model, total, num_processes=1, **changes):
        monkeypatch.setattr(budget_module, "total_memory", lambda _: total)
        model.config.save_pretrained(tmp_path / "model")
        stage = "rm" if isinstance(model, LlamaForSequenceClassification) else "sft"
        base = {
            "artifacts": str(tmp_path),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": "rows.jsonl"},
            "training": {"num_steps": 1},
            "optimizer": {"learning_rate": 1e-3},
            "checkpoints": {"every_minutes": None},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(merged(base, changes)))
        config = load_stage_config(stage, tmp_path / "config.yaml")
        name = "model" if stage == "sft" else "reward model"
        return microbatch_tokens(config, {name: model}, World(0, num_processes, CPU))

    return choose


def test_auto_by_hand(chosen):
    """Weights, gradients, moments, the gradient of the head and a chunk of its logits are constant. What grows are
    activations, and what is kept of the logits."""
    model = llama()
    weights = sum(p.numel() for p in model.parameters())
    head, a_token = 4 * 64 * 500 + HEAD_CHUNK, activation_bytes(model, "float32") + 4 * 500
    total = 0.1 * GB
    wanted = int((SHARE_OF_CPU * total - LIBRARIES - 16 * weights - head) / a_token)
    assert FEWEST_TOKENS < wanted < CPU_TOKENS // 2
    assert chosen(model, total) == wanted
    assert chosen(model, 2 * total, num_processes=2) == wanted
    assert chosen(model, total, training={"tokens_per_microbatch": 77}) == 77
    assert chosen(model, 64 * GB) == CPU_TOKENS
    assert chosen(model, 0.01 * GB) == FEWEST_TOKENS
    # A checkpoint copies weights and moments, and the next step computes meanwhile.
    saving = int((SHARE_OF_CPU * total - LIBRARIES - 28 * weights - head) / a_token)
    assert chosen(model, total, checkpoints={"every_steps": 10}) == saving
    small = int((SHARE_OF_CPU * total - LIBRARIES - (10 + 8 / 256) * weights - head) / a_token)
    assert chosen(model, total, optimizer={"precision": "8bit"}) == small

    # One layer's activations, and the input of each.
    recomputed = (a_token - 4 * 500) / 3 + 3 * 4 * 64 + 4 * 500
    more = int((SHARE_OF_CPU * total - LIBRARIES - 16 * weights - head) / recomputed)
    assert chosen(model, total, gradient_checkpointing=True) == more > 1.9 * wanted

    # A classifier has no logits. Its largest temporary tensors are those of a feed-forward.
    judge = llama(AutoModelForSequenceClassification)
    weights = sum(p.numel() for p in judge.parameters())
    a_token = activation_bytes(judge, "float32") + 3 * 4 * 176
    assert chosen(judge, total) == int((SHARE_OF_CPU * total - LIBRARIES - 16 * weights) / a_token)

    for p in model.model.layers.parameters():
        p.requires_grad_(False)
    assert chosen(model, total) > wanted, "frozen weights need no gradient and no moments"


def test_speed_limits_auto_on_a_cpu(chosen, monkeypatch):
    model = llama()
    a_token = activation_bytes(model, "float32") + 4 * 500
    monkeypatch.setattr(budget_module, "CPU_BYTES", 1500.5 * a_token + HEAD_CHUNK)
    assert chosen(model, 64 * GB) == 1500
    monkeypatch.setattr(budget_module, "CPU_BYTES", 700 * a_token + HEAD_CHUNK)
    assert chosen(model, 64 * GB) == CPU_TOKENS // 2


def test_a_gpu_has_a_limit_and_a_share_of_its_own(write_config, tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    path = write_config("sft", tmp_path, model={"path": str(tmp_path)}, precision="float32")
    config, origins = load_stage_config("sft", path), ModelOrigins({}, {"model": model})

    def chosen(memory):
        machine = Machine("cuda", memory)
        return planned_tokens(config, models_of(config, origins, setting_of(config, machine)), machine)

    weights = sum(p.numel() for p in model.parameters())
    a_token = activation_bytes(model, "float32") + 2 * 4 * 500  # the logits, and what the backward pass needs of them
    assert chosen(80e9) == GPU_TOKENS
    wanted = int((SHARE_OF_GPU * 0.1e9 - 16 * weights - 4 * 64 * 500) / a_token)
    assert chosen(0.1e9) == wanted > CPU_TOKENS


def test_passes_without_gradients(monkeypatch):
    """Weights, the hidden states of a layer, and a chunk of logits."""
    model = llama().requires_grad_(False)
    weights = sum(p.numel() for p in model.parameters())
    a_token = 4 * (3 * 176 + 4 * 64)
    room = 4 * weights + HEAD_CHUNK + 600.5 * a_token
    monkeypatch.setattr(budget_module, "total_memory", lambda _: room / SHARE_OF_CPU)
    assert forward_budget(model, CPU, "float32").tokens == 600


def test_the_memory_limit_of_a_container_is_used(monkeypatch, tmp_path):
    whole = cost.total_memory(CPU)
    assert whole > GB // 2
    limit = tmp_path / "memory.max"
    for text, wanted in (("max\n", whole), (f"{GB // 4}\n", GB // 4), (f"{2**62}\n", whole)):
        limit.write_text(text)
        monkeypatch.setattr(cost, "LIMITS", (str(limit), str(tmp_path / "missing")))
        assert cost.total_memory(CPU) == wanted


# -------------------------------------------------------------------------------- a run and its plan


class Chosen(Exception):
    """Ends a run as soon as its budget is chosen."""


LORA = {"lora": {"r": 2}}
HALF = {"precision": "bfloat16"}
CASES = {
    # Stage, device, megabytes for everything but the libraries, changes of the config.
    "sft": ("sft", "cpu", 7, {"model": {"freeze": ["layers.0"]}, "gradient_checkpointing": True}),
    "sft lora": ("sft", "cuda", 3, {"model": LORA, **HALF}),
    "rm": ("rm", "cpu", 5, {"optimizer": {"precision": "8bit"}}),
    "ppo": ("ppo", "cpu", 9, {"ppo": {"ema_decay": 0.9}, "checkpoints": {"every_steps": 1}}),
    "ppo lora": ("ppo", "cpu", 5, {"policy": LORA, "value_model": {"init": "policy", **LORA}}),
    "ppo offload": ("ppo", "cuda", 5, {"offload": ["optimizer", "frozen"], "ppo": {"entropy_coef": 0.1}, **HALF}),
}


@pytest.fixture(scope="module")
def judge(make_model, run_stage, tmp_path_factory):
    """A reward model."""
    return run_stage("rm", tmp_path_factory.mktemp("judge"), model={"path": str(make_model("llama"))}) / "model"


@pytest.mark.parametrize("name", CASES)
def test_a_run_chooses_what_its_plan_shows(name, make_model, judge, write_config, tmp_path, monkeypatch):
    stage, device, megabytes, changes = CASES[name]
    if "lora" in str(changes):
        pytest.importorskip("peft")
    path = {"path": str(make_model("llama"))}
    rewards, auto = [{"type": "reward_model", "path": str(judge)}], {"tokens_per_microbatch": "auto"}
    starts = {
        "sft": {"model": path},
        "rm": {"model": path},
        "ppo": {"policy": path, "rewards": rewards, "ppo": auto},
    }
    file = write_config(stage, tmp_path, **merged(merged({"precision": "float32"}, starts[stage]), changes))
    config = load_stage_config(stage, file)
    fixed = LIBRARIES / SHARE_OF_CPU if device == "cpu" else 0.0
    machine = Machine(device, fixed + megabytes * 1e6)
    tokens = []

    def choose(*arguments):
        tokens.append(planned_tokens(*arguments))
        raise Chosen

    with monkeypatch.context() as patch, contextlib.suppress(Chosen):
        patch.setattr(stages, "machine_of_run", lambda *_: machine)
        patch.setattr(stages, "planned_tokens", choose)
        if device == "cuda":  # where the layers keep their own attention
            patch.setattr("rlhf_cli.models.load.use_fast_attention", lambda _: None)
        {"sft": sft, "rm": rm, "ppo": ppo}[stage].run(config, quiet=True)
    (one,) = plan_of(file, [], stage, machine, machine.memory, None)
    assert tokens == [one.plan.tokens_per_microbatch]
    # Memory decides.
    assert FEWEST_TOKENS < tokens[0] < CPU_TOKENS // 2


def test_a_later_microbatch_takes_the_row_that_the_first_one_lacks(make_model, write_config, tmp_path):
    changes = {"data": {"max_length": 100}, "training": {"minibatch_size": 12, "tokens_per_microbatch": 1000}}
    file = write_config("sft", tmp_path, model={"path": str(make_model("llama"))}, **changes)
    (one,) = plan_of(file, [], "sft", Machine("cuda", 1e9), 1e9)
    assert (one.plan.batch.tokens, one.plan.batch.num, one.plan.batch.later) == (1000, 2, 300)
