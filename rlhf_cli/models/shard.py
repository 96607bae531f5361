"""Whether a run shards its models among the processes, and how: by torch's `fully_shard` (FSDP2).

What other modules need to know of a sharded model is in `rlhf_cli.processes.sharding`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig, PPOModelName
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.deferred import StoredWeight, blocks, is_deferred, not_finite, place_of
from rlhf_cli.models.forward import PRECISIONS, autocast, check_head, choose_attention, compute_dtype, is_packed
from rlhf_cli.models.frozen import give_float32, trained_matrices
from rlhf_cli.models.heads import is_encoder
from rlhf_cli.models.load import prepare
from rlhf_cli.models.quantized import divisible
from rlhf_cli.processes.sharding import begin_exchange, first_row, local, run_gathered

MOST_WHOLE = 0.1
"""Share of the trained numbers of a group that may stay whole on each process (`_stay_whole`)."""


def shards(config: Stage) -> bool:
    """Whether a run shards its models: `distributed.shard`, and more than one process."""
    return bool(config.distributed.shard) and dist.is_initialized() and dist.get_world_size() > 1


def to_shard(config: PPOConfig, name: PPOModelName) -> Stage | None:
    """The config if it shards this model among the processes, else None."""
    if not shards(config) or name in config.distributed.keep_whole:
        return None
    is_sampled = name == "ref_policy" and config.ref_policy is not None and config.ppo.uses_reference_scores
    return None if is_sampled and config.rollout.decoder != "sharded" else config


def shard_for(config: Stage, model: PreTrainedModel, device: torch.device) -> str | None:
    """`shard_model` as the config says; None if the run does not shard its models."""
    if not shards(config):
        return None
    note = None if is_deferred(model) else f"{type(model).__name__}: each process held all of it before it was sharded"
    is_hybrid = config.distributed.shard == "hybrid"
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if is_hybrid else None
    offloads_frozen = isinstance(config, PPOConfig) and "frozen" in config.offload
    offloads = config.distributed.offload or (offloads_frozen and not is_trained(model))
    narrow = config.optimizer.precision == "bfloat16"
    line = shard_model(model, device, config.precision, per_node=per_node, offloads=offloads, narrow=narrow)
    idle = f"distributed.offload: does nothing on this {device.type}, whose memory holds everything"
    has_one_memory = config.distributed.offload and device.type == "cpu"
    return "\n".join(filter(None, [note, line, idle if has_one_memory else None])) or None


def is_trained(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def prepare_for(config: Stage, model: PreTrainedModel, device: torch.device) -> str | None:
    """`prepare` and `shard_for`. Returns the lines of both."""
    lines = [prepare(model, device), shard_for(config, model, device)]
    return "\n".join(filter(None, lines)) or None


def shard_model(
    model: PreTrainedModel,
    device: torch.device,
    precision: str,
    *,
    per_node: int | None = None,
    offloads: bool = False,
    narrow: bool = False,
) -> str | None:
    """Shard the weights of a model among all processes, in place. All processes must call this.

    Each block of layers is exchanged as a whole, and all weights outside of the blocks together. Each process reads its
    rows of deferred weights now. In bfloat16 blocks are exchanged in bfloat16; embeddings, heads, gradients and the
    rows that a process keeps stay in float32, but for the rows of a frozen block.

    With `per_node` the weights are sharded among this many processes, and all groups of that size hold the same. With
    `offloads` the rows of each process and their gradients stay in the CPU's memory. With `narrow` trained matrices are
    held in bfloat16 if the passes compute in it. Returns what `choose_attention` returns. Raises ArtifactError if a
    deferred weight is not finite.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError("distributed.shard: an encoder-decoder cannot be sharded yet. Set it to false")
    # A pass returns a view of the logits, which nothing here changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    was_deferred = is_deferred(model)
    size = dist.get_world_size()
    if per_node is None or per_node == size:
        mesh = init_device_mesh(device.type, (size,))
    else:
        mesh = init_device_mesh(device.type, (size // per_node, per_node), mesh_dim_names=("nodes", "processes"))
    computed = compute_dtype(device, precision)
    lower = None if computed == torch.float32 or is_encoder(model) else computed
    mixed = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Copies from and to pinned memory are faster. Without a GPU torch cannot pin any.
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloads else OffloadPolicy()
    narrowed = {id(p) for p in trained_matrices(model)} if narrow and lower == torch.bfloat16 else set()
    share = partial(_shard, mesh=mesh, policy=policy, narrowed=narrowed)
    bad = []
    for block in blocks(model):
        for layer in block.modules():
            if type(layer) is nn.LayerNorm and lower is not None:
                layer.__class__ = LayerNorm
        bad += share(block, mixed)
    bad += share(model, MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False))
    if narrowed:
        give_float32(model)
    vars(model)["run_gathered"] = MethodType(run_gathered, model)
    register_fsdp_forward_method(model, "run_gathered")
    everywhere: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(everywhere, bad[:1])
    for message in (message for messages in everywhere for message in messages):
        raise not_finite(message)  # on every process
    # Blocks in 16 bits compute in nothing else.
    precisions = [name for name, dtype in PRECISIONS.items() if dtype == (lower or torch.float32)]
    vars(model)["block_precision"] = precisions[0] if lower is not None else None
    # A model whose weights were not deferred has chosen before, unless adapters needed them.
    line = choose_attention(model, precisions) if was_deferred or not is_packed(model) else None
    with autocast(device, precisions[0]):
        check_head(model)
    return line


class LayerNorm(nn.LayerNorm):
    """torch's layer in the precision of its input. On a CPU torch refuses a weight in another one."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class CountedAllGather(DefaultAllGather):
    """torch's exchange of the rows of a block, which is counted (`num_begun`)."""

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        begin_exchange()
        return super().__call__(*args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """torch's sum of the gradients of a block, which is counted."""

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:
        begin_exchange()
        return super().__call__(*args, **kwargs)


@torch.no_grad()
def _shard(
    module: nn.Module, mixed: MixedPrecisionPolicy, *, mesh: DeviceMesh, policy: OffloadPolicy, narrowed: set[int]
) -> list[str]:
    """Shard the weights of a module that are not sharded yet. Returns the deferred ones that are not finite.

    `narrowed` are the ids of the weights to hold in bfloat16.
    """
    sharded = tuple(f"{name}." for name, part in module.named_modules() if name and isinstance(part, FSDPModule))
    managed = {name: weight for name, weight in module.named_parameters() if not name.startswith(sharded)}
    stay_whole = _stay_whole(managed, narrowed)
    deferred: list[tuple[str, StoredWeight]] = []
    # A frozen weight is only ever used in the precision in which it is exchanged.
    kept = mixed.param_dtype if not is_trained(module) and mixed.param_dtype is not None else torch.float32
    for name, weight in managed.items():
        dtype = torch.bfloat16 if stay_whole is not None and id(weight) in narrowed else kept
        if (place := place_of(weight)) is not None:
            deferred.append((name, place))
            # Memory that is never written takes no room, and most of this is freed by the next call.
            weight.data = torch.empty(weight.shape, device=mesh.device_type, dtype=dtype)
        elif weight.dtype == torch.float32:
            weight.data = weight.data.to(dtype)
    quantized = divisible(module)
    options: dict[str, Any] = {"reshard_after_forward": True, "ignored_params": stay_whole}
    fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=policy, **options)
    for layer in quantized:
        layer.quant_state.to(torch.device(mesh.device_type))
        layer.weight.quant_state = layer.quant_state
    assert isinstance(module, FSDPModule)
    # Losses are divided by counts over all processes, so gradients are summed.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(CountedAllGather())
    module.set_custom_reduce_scatter(CountedReduceScatter())
    bad = []
    for name, place in deferred:
        weight = module.get_parameter(name)
        rows = local(weight)
        values = place.read(first_row(weight), len(rows))
        if not values.isfinite().all():
            bad.append(f"{place.file}: weight {place.name} contains NaN or inf")
        rows.copy_(values)
    return bad


def _stay_whole(weights: Mapping[str, nn.Parameter], narrowed: set[int]) -> set[nn.Parameter] | None:
    """The weights that every process keeps whole, so that all others of a group that are trained are bfloat16.

    torch shards only gradients of one number format together, and norms, biases and scalar heads are trained in
    float32. None if too many numbers would be whole (an embedding of a class of its own): the group is then sharded in
    float32.
    """
    trained = [weight for weight in weights.values() if weight.requires_grad]
    wide = {weight for weight in trained if id(weight) not in narrowed}
    if len(wide) == len(trained):
        return None
    is_small = sum(w.numel() for w in wide) <= MOST_WHOLE * sum(w.numel() for w in trained)
    return wide if is_small else None
