"""Memory of the stages on a GPU in bfloat16, phase by phase, against `rlhf plan`. Parts of gpu.py.

A stage runs two optimizer steps or three iterations on rows of the maximum length, in a process of its own. The peak of
each phase is torch's `max_memory_allocated` without what cuBLAS keeps: this is what the plan counts.
`max_memory_reserved` is what the process takes from the GPU, beside some 0.5 GB for CUDA itself. On a CPU the figures
are resident memory and only check the script.
"""

import gc
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpu_inputs import Inputs
from speed_inputs import write_config

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.plan.fit import machine_of, plan_of
from rlhf_cli.plan.memory import Machine

HEAD = ["model", "stage", "weights", "phase", "plan, GB", "allocated, GB", "plan / allocated", "reserved, GB"]
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": {"r": 16}},
    "NF4": {"lora": {"r": 16, "quantize": "nf4"}},
}
"""What is trained, as keys of `model`, `policy` and `value_model`. Adapters are saved alone, which saves time."""
PACE = ("data", "step", "rollout", "scoring", "reward", "update")
"""The phases of a step or an iteration whose seconds are in metrics.jsonl."""
FUNCTIONS = {
    # The innermost function that is at work gives the phase.
    "sft": {"stages.sft": {"_accumulate": "update"}, "rlhf_cli.training.supervised.Loop": {"save": "save"}},
    "rm": {
        "stages.rm": {"_accumulate": "update", "samples_of_sft": "normalisation", "_backbone": "load"},
        "rlhf_cli.training.supervised.Loop": {"save": "save"},
    },
    "ppo": {
        "stages.ppo": {
            "_rollout": "scoring",
            "ask_rewards": "scoring",
            "_update": "update",
            "save_models": "save",
        },
        "rlhf_cli.rollout.rollout": {"sample": "rollout"},
    },
}
"""The functions of each phase of the plan, by module or class. Whatever runs before them is the phase `load`."""


class Meter:
    """The peak of each phase. A phase lasts until another one begins; it may begin again."""

    def __init__(self, device: torch.device):
        self.device, self.phase, self.depth = device, "load", 0
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self._reset()
        self._start = self._peaks()[0] if device.type == "cpu" else kept_by_cublas(device)

    def begin(self, phase: str) -> None:
        """Note the peaks of the phase that ends here."""
        for noted, peak in zip((self.allocated, self.reserved), self._peaks(), strict=True):
            noted[self.phase] = max(noted.get(self.phase, 0), peak - self._start)
        self._reset()
        self.phase = phase

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Let a function of a module or class begin a phase.

        What follows the function belongs to the same phase, but for a function that another one called: then the phase
        of that one begins again.
        """
        inner = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            outer = self.phase if self.depth else phase
            self.depth += 1
            self.begin(phase)
            try:
                return inner(*given, **named)
            finally:
                self.depth -= 1
                self.begin(outer)

        setattr(owner, name, call)

    def _peaks(self) -> tuple[int, int]:
        """(allocated, reserved) since the last reset; on a CPU the largest resident memory twice."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        lines = Path("/proc/self/status").read_text().splitlines()
        resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return resident, resident

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # not every container allows it: then the peak is that of the whole run so far
                Path("/proc/self/clear_refs").write_text("5")


def kept_by_cublas(device: torch.device) -> int:
    """Bytes that cuBLAS keeps in each thread for its products, up to 32 MB. No plan counts them."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()  # backward passes have a thread of their own
    del x
    return torch.cuda.memory_allocated(device)


def measure(inputs: Inputs, stage: str, kind: str) -> dict[str, Any]:
    """Run a stage; returns its rows for the table, its planned phases and its last metrics."""
    path = config_of(inputs, stage, kind)
    config = load_stage_config(stage, path)
    shutil.rmtree(config.artifacts, ignore_errors=True)
    meter = Meter(inputs.device)
    for owner, functions in FUNCTIONS[stage].items():
        for name, phase in functions.items():
            meter.watch(_import(owner), name, phase)
    _import(f"stages.{stage}").run(config, quiet=True)
    meter.begin("end")
    lines = (Path(config.artifacts) / stage / "metrics.jsonl").read_text().splitlines()
    metrics = last_with_pace([json.loads(line) for line in lines])
    shutil.rmtree(config.artifacts, ignore_errors=True)
    gc.collect()
    planned = plan_of(path, [], stage, machine(inputs.device), 1e15, None)[0].plan
    phases = {phase.name: phase.parts for phase in planned.phases}
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    return {
        "rows": [[stage.upper(), kind, *row] for row in rows_of(totals, meter.allocated, meter.reserved)],
        "pace": [pace(f"{stage.upper()} {kind}", metrics, planned.tokens_per_microbatch)],
        "planned": phases,
        "allocated": meter.allocated,
        "reserved": meter.reserved,
        "tokens_per_microbatch": planned.tokens_per_microbatch,
        "metrics": {name: value for name, value in metrics.items() if not isinstance(value, dict | list)},
    }


def rows_of(
    planned: Mapping[str, float], allocated: Mapping[str, float], reserved: Mapping[str, float]
) -> list[list[str]]:
    """A row for the peak of the run and for each phase that was planned and measured.

    >>> rows_of({"load": 1e9, "update": 3e9}, {"load": 1e9, "update": 2e9}, {"load": 1e9, "update": 4e9})
    [['peak', '3.00', '2.00', '1.50', '4.00'], ['load', '1.00', '1.00', '1.00', '1.00'], \
['update', '3.00', '2.00', '1.50', '4.00']]
    """
    figures = {"peak": tuple(max(sizes.values()) for sizes in (planned, allocated, reserved))}
    figures |= {name: (planned[name], allocated[name], reserved[name]) for name in planned if name in allocated}
    return [
        [name, f"{plan / 1e9:.2f}", f"{size / 1e9:.2f}", f"{plan / max(size, 1):.2f}", f"{held / 1e9:.2f}"]
        for name, (plan, size, held) in figures.items()
    ]


def last_with_pace(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last row of metrics with the seconds of a step. The row of an evaluation has none.

    >>> last_with_pace([{"time/step_s": 1.0}, {"time/step_s": 2.0}, {"eval/loss": 3.0}])
    {'time/step_s': 2.0}
    """
    return next(row for row in reversed(rows) if any(f"time/{name}_s" in row for name in PACE))


def pace(what: str, metrics: Mapping[str, float], tokens: int) -> list[str]:
    """The row of the table of speed: the seconds of the last step or iteration by phase, and the sampler's gap.

    >>> pace("PPO LoRA", {"time/rollout_s": 4.0, "time/update_s": 1.5, "policy/sampler_gap_mean": 0.004}, 8192)[-1]
    'rollout 4.00 s, update 1.50 s; at most 8,192 tokens per microbatch; sampler gap 0.0040 nats'
    """
    seconds = {name: metrics[f"time/{name}_s"] for name in PACE if f"time/{name}_s" in metrics}
    phases = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    remarks = f"{phases}; at most {tokens:,} tokens per microbatch"
    if "policy/sampler_gap_mean" in metrics:
        remarks += f"; sampler gap {metrics['policy/sampler_gap_mean']:.4f} nats"
    return [what, f"{sum(seconds.values()):.2f} s", "", "", remarks]


def machine(device: torch.device) -> Machine:
    """This machine, as `rlhf plan` sees it."""
    return machine_of(None, None, None, 8) if device.type == "cuda" else Machine("cpu", 8e9)


def config_of(inputs: Inputs, stage: str, kind: str) -> Path:
    """Write the config of a run."""
    plan, adapters, rows = inputs.plan, KINDS[kind], inputs.rows
    if adapters:
        adapters = {"lora": adapters["lora"] | {"save": "adapter"}}
    folder = inputs.folder / f"memory {stage} {kind}"
    data = {"test_fraction": 0, "train": str(rows / f"{'prompts' if stage == 'ppo' else stage}.jsonl")}
    config: dict[str, Any] = inputs.stage_config(folder / "artifacts")
    if stage == "ppo":
        config |= {
            "policy": {"path": str(inputs.base), **adapters},
            "rewards": [{"type": "reward_model", "path": str(inputs.reward)}],
            "value_model": adapters,
            "data": data | {"max_prompt_length": plan.prompt},
            "rollout": {"max_new_tokens": plan.response},
            "ppo": {"num_iterations": 3, "rollout_batch_size": plan.ppo_rows, "minibatch_size": plan.ppo_rows},
        }
    else:
        config |= {
            "model": {"path": str(inputs.base), **adapters},
            "data": data | {"max_length": plan.prompt + plan.response},
            "training": {"num_steps": 2, "minibatch_size": plan.rows},
        }
        if stage == "sft":
            config["data"]["loss_on"] = "all"
        else:
            config["evaluation"] = {"num_normalization_samples": plan.rows, "max_new_tokens": plan.response}
    return write_config(folder / f"{stage}.yaml", config)


def _import(name: str) -> Any:
    """A module, or a class in one."""
    with suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
