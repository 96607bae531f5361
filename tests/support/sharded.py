"""A program for several processes: train models whole and sharded on the same batches, and compare them.

compare(folder) in each process writes folder/gaps.json: the largest differences of each case.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedModel

from rlhf_cli.config.models import Lora
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.config.stage import Optimizer
from rlhf_cli.data.answers import RankedIds, TargetScale
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.decoders import plain
from rlhf_cli.models import load, save
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.deferred import blocks
from rlhf_cli.models.forward import autocast, target_logprobs
from rlhf_cli.models.frozen import hold_trained
from rlhf_cli.models.passes import compile_passes, recompute_layers
from rlhf_cli.models.quantized import quantize
from rlhf_cli.models.shard import shard_model
from rlhf_cli.processes import distributed
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.sharding import device_of, like, local, plain_class, whole
from rlhf_cli.rollout.offload import Offload
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from rlhf_cli.run.checkpoint import CheckpointStore, Weights
from rlhf_cli.training import optimizer as optimizers
from rlhf_cli.training.bad_steps import LossScale
from rlhf_cli.training.optimizer import build_stepper
from stages import rm, sft
from support.compare import merged_copy
from support.tiny import random_ids, tiny_model

VOCABULARY = 97
"""That of `tiny_model`. Neither 2 nor 4 processes divide it."""
STEPS = 6
COMPARED_STEPS = 3
"""Steps of each case. In the second only the first process has a row."""
LEARNING = Optimizer(learning_rate=3e-3, eps=1e-3, schedule="constant", weight_decay=0.1, max_grad_norm=0.5)
LORA = Lora(r=4, alpha=8)
CASES: dict[str, dict[str, Any]] = {
    "llama tied": {"tied": True},
    "llama": {},
    "qwen2 tied": {"family": "qwen2", "tied": True},
    "gpt2": {"family": "gpt2", "tied": True},
    "gpt_neox": {"family": "gpt_neox"},
    "bloom": {"family": "bloom", "tied": True},
    "gemma2": {"family": "gemma2", "tied": True},
    "opt": {"family": "opt", "tied": True},
    "mixtral": {"family": "mixtral"},  # transformers joins the experts of the files, so they cannot be deferred
    "llama lora": {"lora": True, "tied": True},
    "llama reward": {"reward": True},
    "llama bfloat16": {"precision": "bfloat16"},
    "llama bfloat16 adamw": {"precision": "bfloat16", "adamw": "bfloat16", "tied": True},
    "gpt2 bfloat16 adamw": {"family": "gpt2", "precision": "bfloat16", "adamw": "bfloat16"},
    "reward bfloat16 adamw": {"precision": "bfloat16", "adamw": "bfloat16", "reward": True},
    "llama 8bit": {"adamw": "8bit", "size": 256},
    "llama float16": {"precision": "float16"},
    "qwen2 8bit tied": {"family": "qwen2", "adamw": "8bit", "tied": True, "size": 64},
    "llama hybrid": {"tied": True, "per_node": 2},
    "llama nf4": {"lora": True, "quantize": "nf4", "wide": True},
    "llama nf4_double": {"lora": True, "quantize": "nf4_double", "wide": True, "tied": True},
    "gpt2 reward lora": {"family": "gpt2", "reward": True, "lora": True},
}
OFFLOADED = ("llama tied", "llama bfloat16", "llama bfloat16 adamw", "llama hybrid", "llama nf4", "gpt2 reward lora")
"""Cases that are also trained with their rows in the memory of the CPU."""


def make_models(folder: Path, *names: str) -> None:
    """Write the model of each of these cases, or of all."""
    for name, case in {name: CASES[name] for name in names or CASES}.items():
        size = 64 if case.get("wide") else case.get("size")
        wide = {"hidden_size": size, "intermediate_size": 2 * size} if size else {}
        model = tiny_model(case.get("family", "llama"), **wide, tie_word_embeddings=case.get("tied", False))
        model.save_pretrained(folder / name)


def batches() -> list[list[list[int]]]:
    """Six batches of unequal rows. The second has one row only, so that the other processes have none."""
    sizes = [5, 1, 7, 5, 3, 6]
    return [[[i % VOCABULARY for i in ids] for ids in random_ids(*range(4, 4 + 3 * n, 3), seed=n)] for n in sizes]


class Trained:
    """A model that is trained for some steps, on a world of one or sharded over all."""

    def __init__(self, folder: Path, case: dict[str, Any], world: World, *, sharded: bool | None = None):
        self.world, self.case, self.precision = world, case, case.get("precision", "float32")
        is_sharded = world.size > 1 if sharded is None else sharded
        if case.get("reward"):
            self.model, _ = load.new_reward_model(str(folder), None, seed=0, head_std=None, deferred=is_sharded)
        else:
            self.model = load.load_policy(str(folder), deferred=is_sharded)
        load.prepare(self.model, world.device)
        narrow = case.get("adamw") == "bfloat16"
        if case.get("lora"):
            if "quantize" in case:
                quantize(self.model, case["quantize"], "model.lora.quantize")
            add_lora(self.model, LORA, "model.lora", seed=0)
        if is_sharded:
            offloads, per_node = case.get("offloads", False), case.get("per_node")
            shard_model(self.model, world.device, self.precision, per_node=per_node, offloads=offloads, narrow=narrow)
        self.model.train()
        if narrow:
            hold_trained(self.model)
        learning = LEARNING.model_copy(update={"precision": case.get("adamw", "float32")})
        self.stepper = build_stepper(self.model, learning, STEPS)

    def step(self, ids: list[list[int]]) -> tuple[float, float]:
        """One optimizer step: the loss and the norm of the gradient."""
        # Small microbatches: one process has more of them than the other.
        budget = Budget(16)
        stage: Any = SimpleNamespace(world=self.world, loss_scale=LossScale(self.world.device, "float32"))
        if self.case.get("reward"):
            pairs = zip(ids, ids[1:] + ids[:1], strict=True)
            record = Record("", "", (Answer("a"), Answer("b")), ranked=True)
            items: list[Any] = [RankedIds([a, b], record) for a, b in pairs]
            config = RM.model_copy(update={"precision": self.precision})
            loss = rm._accumulate(self.model, items, TargetScale(0.0, 1.0), budget, config, stage)["loss/rm"]
        else:
            rows = [Example(row, [False] * 2 + [True] * (len(row) - 2), "") for row in ids]
            loss = sft._accumulate(self.model, rows, budget, self.precision, stage)
        norm = self.stepper.clip(self.world)
        self.stepper.advance()
        return loss, norm

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(p.detach()) for name, p in self.model.named_parameters()}


TRAINING = {"training": {"num_steps": STEPS}, "optimizer": {"learning_rate": 1.0}}
RM = RMConfig.model_validate({"artifacts": "none", "data": {"train": "none.jsonl"}, **TRAINING})


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models' weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def train(folder: Path, name: str, case: dict[str, Any], world: World) -> dict[str, float]:
    """Train a case sharded, and whole in the main process; the largest differences, which only that process knows."""
    together = Trained(folder / name, case, world, sharded=True)
    alone = Trained(folder / name, case, World(0, 1, world.device)) if world.is_main else None
    if alone is not None and world.size > 1:
        held, total = (sum(local(p).numel() for p in one.model.parameters()) for one in (together, alone))
        assert held < 0.7 * total
    assert not any(sharded.offload_to_cpu for sharded in sharded_weights(together.model))
    waiting = Trained(folder / name, {**case, "offloads": True}, world, sharded=True) if name in OFFLOADED else None
    # torch takes the way through the CPU's memory for every weight.
    assert waiting is None or all(sharded.offload_to_cpu for sharded in sharded_weights(waiting.model))
    start, is_same = {key: weight.clone() for key, weight in together.weights().items()}, True
    found = {"before": 0.0 if alone is None else gap(alone.weights(), start), "loss": 0.0, "norm": 0.0}
    for ids in batches()[:COMPARED_STEPS]:
        loss, norm = together.step(ids)
        is_same &= waiting is None or waiting.step(ids) == (loss, norm)
        if alone is not None:
            loss_alone, norm_alone = alone.step(ids)
            found["loss"] = max(found["loss"], abs(loss - loss_alone))
            found["norm"] = max(found["norm"], abs(norm - norm_alone) / max(norm_alone, 1e-2))
    end = together.weights()
    if alone is not None:
        found |= {"weights": gap(alone.weights(), end), "moved": gap(start, end)}
    if case.get("adamw") == "8bit" and world.device.type == "cpu":
        check_optimizer(world, "8bit")
    if waiting is not None:
        if world.device.type == "cpu":
            found["offloaded"] = float(all(world.gather(is_same and same_bits(together, waiting))))
        else:  # AdamW steps on another device
            found["offloaded"] = float(gap(end, waiting.weights()) < 1e-5)
        check_moments(together)
    found["saved"] = saved_gap(folder / f"{name} saved", together.model, alone and alone.model)
    return found


def saved_gap(folder: Path, sharded: PreTrainedModel, plain: PreTrainedModel | None) -> float:
    """Write the sharded model in several files; the largest difference to the plain one as transformers writes it,
    in the process that has that one."""
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda _: None)
    whole_folder = folder.with_name(f"{folder.name} whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "LARGEST_FILE", 20_000)
        save.save(sharded, tokenizer, folder, "float32")
    if plain is None:
        return 0.0
    whole = merged_copy(plain)
    whole.save_pretrained(whole_folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for file in ("config.json", "generation_config.json"):
        assert not (whole_folder / file).is_file() or (folder / file).read_bytes() == (whole_folder / file).read_bytes()
    again = plain_class(sharded).from_pretrained(folder)  # type: ignore[attr-defined]
    assert again.state_dict().keys() == whole.state_dict().keys()
    written = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    return gap(load_file(whole_folder / "model.safetensors"), written)


def end(world: World, folder: str, figures: Any) -> None:
    """Let the first process write the figures, and end this one."""
    if world.is_main:
        Path(folder, "gaps.json").write_text(json.dumps(figures), encoding="utf-8")
    world.barrier()
    distributed.stop()


def interrupted(folder: str, case: str) -> None:
    """The program of each process of a run that saves a checkpoint after three of its six steps."""
    world = distributed.start("cpu")
    run = Trained(Path(folder, case), CASES[case], world)
    for ids in batches()[:3]:
        run.step(ids)
    store = checkpoints_of(run, Path(folder))
    store.save(3)
    store.wait()
    distributed.stop()


def resumed(folder: str, case: str) -> None:
    """The program of each process of a run that resumes from that checkpoint. Writes the difference to one process."""
    world = distributed.start("cpu")
    run = Trained(Path(folder, case), CASES[case], world)
    store = checkpoints_of(run, Path(folder))
    path, rejected = store.newest(lambda _: None)
    assert path is not None
    assert not rejected
    store.restore(path)
    for ids in batches()[3:]:
        run.step(ids)
    weights = run.weights()
    difference = 0.0
    if world.is_main:
        alone = Trained(Path(folder, case), CASES[case], World(0, 1, world.device))
        for ids in batches():
            alone.step(ids)
        difference = gap(alone.weights(), weights)
    end(world, folder, difference)


def same_bits(a: Trained, b: Trained) -> bool:
    """Whether the weights and moments of this process are the same to the last bit."""
    first, second = ({**Weights(run.model).state()[0], **run.stepper.state()[0]} for run in (a, b))
    assert first.keys() == second.keys()
    return all(torch.equal(local(tensor), local(second[name])) for name, tensor in first.items())


def check_moments(run: Trained) -> None:
    """The moments leave for the memory of the CPU outside of an update, and come back with their bits."""

    def moments() -> list[torch.Tensor]:
        return [state["exp_avg"] for state in run.stepper.optimizer.state.values()]

    offload, before = Offload(run.world.device, [], [run.stepper.optimizer]), moments()
    offload.sampling(run.model)
    away = moments()
    with offload.update():
        for one, other, last in zip(before, away, moments(), strict=True):
            assert len({local(t).data_ptr() for t in (one, other, last)}) == 3 or not local(one).numel()
            assert isinstance(last, DTensor) == isinstance(one, DTensor)
            assert torch.equal(local(one), local(last))


def check_optimizer(world: World, kind: Any) -> None:
    """A sharded weight has the bits of the whole one: in bfloat16 by the same random numbers, and with 8-bit moments,
    the scales of whose blocks are those of whole rows."""
    generator, is_8bit = torch.Generator().manual_seed(0), kind == "8bit"
    given = [torch.randn(33, 512 if is_8bit else 50, generator=generator) for _ in range(4)]
    given = given if is_8bit else [tensor.bfloat16() for tensor in given]
    mesh = DeviceMesh("cpu", torch.arange(world.size))
    sharded = torch.nn.Parameter(distribute_tensor(given[0], mesh, [Shard(0)]))
    unsharded = torch.nn.Parameter(given[0].clone())
    learning = Optimizer(learning_rate=0.1, precision=kind)
    with pytest.MonkeyPatch.context() as patch:
        if not is_8bit:
            patch.setattr(optimizers, "CHUNK", 300)
            patch.setattr(optimizers, "DRAWN", 256)
        for weight in (sharded, unsharded):
            optimizer = optimizers.new_adamw([{"params": [weight]}], learning, 0.1, seed=0)
            for gradient in given[1:]:
                weight.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if weight is sharded else gradient.clone()
                optimizer.step()
    assert ("state1" in optimizer.state[unsharded]) == is_8bit
    assert torch.equal(whole(sharded), unsharded)
    assert not torch.equal(unsharded, given[0])


def compiled(folder: str) -> None:
    """The program of each process that trains a sharded model compiled and as it is. Writes the largest difference."""
    world = start("cpu")
    plain, other = (Trained(Path(folder, "llama"), CASES["llama"], world, sharded=True) for _ in range(2))
    compile_passes(other.model, world.device, "float32")
    for _ in range(2):  # of one length, as another would be compiled again
        plain.step(batches()[1]), other.step(batches()[1])
    end(world, folder, gap(plain.weights(), other.weights()))


def check_devices(world: World) -> None:
    """Rows on the CPU whose processes exchange on another device, which stands for GPUs."""
    gpus = DeviceMesh("meta", torch.arange(world.size))
    rows = torch.ones(2, 1)
    spec = DTensorSpec(gpus, (Shard(0),), TensorMeta(torch.Size([2 * world.size, 1]), (1, 1), rows.dtype))
    weight = torch.nn.Parameter(DTensor(rows, spec, requires_grad=False))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    assert weight.device == local(like(weight, rows)).device == torch.device("cpu")
    assert device_of(model) == whole(weight).device == torch.device("meta")


def sharded_weights(model: PreTrainedModel) -> list[Any]:
    """What torch keeps of each sharded weight."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [sharded for state in states for group in state._fsdp_param_groups for sharded in group.fsdp_params]


def frozen(folder: str, case: str) -> None:
    """The program of each process that compares a frozen model in bfloat16 with the same one with gradients."""
    world = distributed.start("cpu")
    ids = batches()[0]
    scores, kept = [], []
    for requires_grad in (True, False):
        model = load.load_policy(str(Path(folder, case)), deferred=True).requires_grad_(requires_grad)
        load.prepare(model, world.device)
        shard_model(model, world.device, "bfloat16")
        kept.append(sum(local(p).nbytes for p in blocks(model)[0].parameters()))
        with torch.no_grad(), autocast(world.device, "bfloat16"):
            scores.append(target_logprobs(model, ids, [[False] + [True] * (len(row) - 1) for row in ids]))
    end(world, folder, {"bytes": kept, "difference": (scores[0] - scores[1]).abs().max().item()})


def sampled(folder: str) -> None:
    """The program of each process that samples its share of the prompts from a sharded model. Writes the number of
    tokens that differ from those of a whole model, and the largest difference of a log-probability.
    """
    world = distributed.start("cpu", timeout_s=60)
    whole_model, model = (load.load_policy(str(Path(folder, "llama")), deferred=d) for d in (False, True))
    for each in (whole_model, model):
        load.prepare(each, world.device)
    shard_model(model, world.device, "float32", per_node=CASES["llama hybrid"]["per_node"] if world.size > 2 else None)
    prompts = [[i % VOCABULARY for i in ids] for ids in random_ids(3, 9, 5, 5, 1, 12, 7, seed=1)]
    uniforms = draw_uniforms(0, "sharded", 0, len(prompts), 12)
    found = {}
    for name, (settings, padded, live) in SAMPLED.items():
        sampling = Sampling(stop=frozenset(range(10)), **settings)
        expected = sample(whole_model, prompts, uniforms, sampling, max_live_rows=live)
        lengths = [len(response.ids) for response in expected]
        by_length = sorted(range(len(prompts)), key=lengths.__getitem__)
        # The second process has the shortest two; the others, but for the first, none.
        share = {0: by_length[2:], 1: by_length[:2]}.get(world.rank, [])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "takes_padding", lambda _, padded=padded: padded)
            responses = sample(model, [prompts[i] for i in share], uniforms[share], sampling, max_live_rows=live)
        wrong, gap_of_logprobs = 0, 0.0
        for i, response in zip(share, responses, strict=True):
            wrong += response.ids != expected[i].ids
            pairs = zip(response.logprobs, expected[i].logprobs, strict=False)
            gap_of_logprobs = max([gap_of_logprobs, *(abs(a - b) for a, b in pairs)])
        everyone = world.gather((wrong, gap_of_logprobs))
        found[name] = [sum(n for n, _ in everyone), max(gap for _, gap in everyone)]
    end(world, folder, found)


SAMPLED: dict[str, tuple[dict[str, Any], bool, int | None]] = {
    "all at once": ({}, True, None),
    "two at a time": ({}, True, 2),
    "filtered": ({"top_k": 9, "no_repeat_ngram_size": 3, "temperature": 0.7}, True, None),
    "without a cache": ({}, False, 3),
}
"""Settings, whether prompts are padded, and rows at a time."""


def counted(folder: str, per_node: int | None = None) -> None:
    """The program of each process that counts the bytes it sends: in a training step whose layers are recomputed, and
    in the sampling of five tokens. A ring is taken to send (N - 1) / N of what is gathered or scattered, and twice that
    of what is summed."""
    world = distributed.start("cpu")
    run = Trained(Path(folder, "llama"), {"precision": "bfloat16", "per_node": per_node}, world)
    recompute_layers(run.model)
    stage: Any = SimpleNamespace(world=world, loss_scale=LossScale(world.device, "float32"))
    ids = [[i % VOCABULARY for i in row] for row in random_ids(9, 5)]
    rows = [Example(row, [True] * len(row), "") for row in ids]
    sent = summed = 0.0

    def counting(operation: Any, *, sums: bool) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            nonlocal sent, summed
            tensors = [arg for arg in (*args, *options.values()) if isinstance(arg, torch.Tensor)]
            if (group := options.get("group")) is not None:  # other sums are of a few figures
                # The larger one has the rows of all processes.
                share = max(tensor.nbytes for tensor in tensors) * (group.size() - 1) / group.size()
                sent, summed = (sent, summed + 2 * share) if sums else (sent + share, summed)
            return operation(*args, **options)

        return count

    figures = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
            patch.setattr(dist, name, counting(getattr(dist, name), sums=name == "all_reduce"))
        sft._accumulate(run.model, rows, Budget(999), "bfloat16", stage)
        figures |= {"step": sent, "sum": summed}
        run.model.eval()
        for _ in range(2):  # the first sampling compares the layouts, too
            sent = 0.0
            with autocast(world.device, "bfloat16"):
                sample(run.model, ids[:1], torch.zeros(1, 5), Sampling())
        figures["sampling"] = sent
    end(world, folder, figures)


def checkpoints_of(run: Trained, folder: Path) -> CheckpointStore:
    store = CheckpointStore(folder, keep=2, world=run.world)
    store.parts = {"model": Weights(run.model), "optimizer": run.stepper}
    return store


def start(device: str) -> World:
    """The world of these processes. One may shard among itself."""
    world = distributed.start(device)
    if world.size == 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return world


def compare(folder: str, device: str = "cpu") -> None:
    """The program of each process that compares whole and sharded training."""
    world = start(device)
    cases = json.loads(Path(folder, "cases.json").read_text(encoding="utf-8"))
    if device == "cpu":
        check_devices(world)
        check_optimizer(world, "bfloat16")
    gaps = {name: train(Path(folder), name, CASES[name], world) for name in cases}
    end(world, folder, gaps)
