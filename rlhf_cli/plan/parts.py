"""What the plans of all stages share: the machine, and the phases of loading, training and saving."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_cli.models.save import LARGEST_FILE
from rlhf_cli.plan.activations import ROW
from rlhf_cli.plan.memory import (
    LIBRARIES,
    SHARDING,
    Batch,
    Held,
    Phase,
    Setting,
    communication_bytes,
    copies_of_weights,
    decoder_bytes,
    fullest,
    gradient_bytes,
    join,
    moment_bytes,
    pass_bytes,
    step_bytes,
    weight_bytes,
)


@dataclass(frozen=True)
class Machine:
    """What each process has."""

    device: str
    """cpu or cuda."""
    memory: float
    """Bytes for one process."""
    processes: int = 1
    per_node: int = 8
    """Processes of one machine, for `distributed.shard: hybrid`."""
    name: str = "this machine"
    auto_is_half: bool = True
    """Whether `precision: auto` computes in 16 bits on its GPU."""


@dataclass(frozen=True)
class StagePlan:
    """The models of a stage and its phases in their order."""

    stage: str
    models: list[Held]
    phases: list[Phase]
    batch: Batch
    tokens_per_microbatch: int
    setting: Setting

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def precision_of(setting: Setting) -> str:
    return "bfloat16" if setting.half else "float32"


def libraries(setting: Setting) -> dict[str, float]:
    size = LIBRARIES[precision_of(setting)] + (SHARDING if setting.sharded > 1 else 0)
    return {"libraries": size} if setting.device == "cpu" else {}


def load(models: list[Held], setting: Setting, *, sampler: Held | None = None, copied: bool = False) -> Phase:
    """Each model is read beside those before it, on a GPU on the host.

    Weights that are held in fewer bits are read one after the other, and others all in float32. At the end each model
    makes a short pass (`activation_bytes`), and the decoder is compared with the policy.

    Args:
        models: all models.
        setting: how a process computes.
        sampler: the model that the decoder reads, if the stage samples from one of `models`.
        copied: whether it is a whole copy of a sharded one, in float32 until it has been compared.
    """
    held, moments = 0.0, []
    for model in models:
        if not model.shares:
            reads = _read_bytes(model, setting) if setting.device == "cpu" else 0.0
            moments.append({"weights": held + max(reads, weight_bytes(model, setting))})
        held += weight_bytes(model, setting)
    copy = {"rollout copy": 4.0 * sampler.shape.weights} if sampler is not None and copied else {}
    passes = [
        join(copy, copies_of_weights(model, setting), {"activations": 2 * ROW * model.shape.counts.kept})
        for model in models
    ]
    if sampler is not None:
        passes.append(join(copy, decoder_bytes(sampler, setting)))
    moments += [join({"weights": held}, parts) for parts in passes]
    # Most of what the library generates for 16 bits is for the shapes of later passes.
    return Phase("load", join(libraries(replace(setting, half=False)), fullest(moments)))


def _read_bytes(model: Held, setting: Setting) -> float:
    """Weights that are held in fewer bits are read one after the other; adding an adapter needs three copies of one."""
    shape, lora = model.shape, model.shape.lora
    if (setting.half and model.kept != "float32") or (lora is not None and lora.quantize is not None):
        merging = 3 * shape.hidden * shape.widest if shape.is_merged else 0
        return weight_bytes(model, setting) + 4 * max(shape.largest, merging)
    # transformers joins the experts of a file to one weight of each layer.
    return (shape.counts.base + shape.counts.experts) * 4 / model.among(setting)


def at_rest(models: list[Held], setting: Setting) -> dict[str, float]:
    """What a process holds between the passes, of models that are all trained."""
    weights = sum(weight_bytes(model, setting) for model in models)
    moments = sum(moment_bytes(model, setting) for model in models)
    return join(libraries(setting), {"weights": weights, "optimizer": moments})


def training(trained: list[Held], batch: Batch, setting: Setting, static: dict[str, float]) -> list[Phase]:
    """The passes of an update, the sum of the gradients over the processes, and a checkpoint, beside `static`."""
    gradients = [gradient_bytes(model, setting) for model in trained]
    moments = []
    for number, model in enumerate(trained):
        # In a later microbatch all gradients exist. In the first one only those of the models before this one do.
        moments.append(join(static, {"gradients": sum(gradients[:number])}, pass_bytes(model, batch, setting)))
        if batch.num > 1:
            moments.append(join(static, {"gradients": sum(gradients)}, pass_bytes(model, batch.after_first, setting)))
    step = max(step_bytes(model, setting) for model in trained)
    moments.append(join(static, {"gradients": sum(gradients), "step": step}))
    update = fullest(moments)
    phases = [Phase("update", update)]
    sums = max(communication_bytes(model, setting) for model in trained)
    if sums:
        phases.append(Phase("sum of gradients", join(static, {"gradients": sum(gradients), "communication": sums})))
    if setting.saves and setting.device == "cpu":
        copy = sum(gradient_bytes(model, setting) + moment_bytes(model, setting) for model in trained)
        phases.append(Phase("checkpoint", join(update, {"checkpoint": copy})))
    return phases


def save(trained: list[Held], setting: Setting, static: dict[str, float]) -> Phase:
    """What the file of a trained model needs on a CPU, beside `static`; weights of its own precision need nothing."""
    copy = max(_file_bytes(model, setting) for model in trained) if setting.device == "cpu" else 0.0
    return Phase("save", join(static, {"file": copy}))


def _file_bytes(model: Held, setting: Setting) -> float:
    """Merged weights in float32, those of one file of a sharded model, and their copy in bfloat16."""
    shape = model.shape
    if shape.lora is not None and shape.lora.save == "adapter":
        return 0.0
    is_sharded = model.among(setting) > 1
    whole = 4 * shape.counts.base if shape.lora is not None or is_sharded else 0.0
    rounded = 2 * shape.counts.base if shape.stored == 2 else 0.0
    return min(whole + rounded, 1.5 * LARGEST_FILE) if is_sharded else whole + rounded
