"""Measure how the time of a training step, a rollout and scoring grows with batch, response, model and vocabulary.

    python benchmarks/growth.py --work DIR

Each size is measured at four points with the others fixed: processor seconds on one core, the minimum of several
interleaved tries. The exponent is the slope of the logarithms, over all points and between the last two, where the
fastest growing part shows. The table compares it with the exponent of the work itself between the last two points: its
arithmetic, bytes and calls at this machine's limits (speed_limits.py). A larger measured exponent means that something
grows faster than the work.

Writes DIR/results/growth.json, which speed_report.py turns into a table. About two minutes.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from speed_inputs import Size
from speed_limits import Work, measure, rollout_work, scoring_work, sft_work
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

import stages.sft
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record
from rlhf_cli.models.forward import is_packed
from rlhf_cli.models.load import prepare
from rlhf_cli.plan.budget import auto_tokens, machine_of_run
from rlhf_cli.plan.memory import Batch, Held, Phase, Setting
from rlhf_cli.plan.shapes import shape_of_loaded
from rlhf_cli.plan.stages import FULL, training_phases
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.rewards.models import score_sequences
from rlhf_cli.rollout.rollout import Models, cut_responses, score_tokens
from rlhf_cli.rollout.sampling import Response, Sampling, draw_uniforms, sample
from rlhf_cli.training.bad_steps import LossScale
from rlhf_cli.training.optimizer import build_stepper


@dataclass(frozen=True)
class Point:
    """The sizes of one point."""

    batch: int = 16
    prompt: int = 32
    response: int = 32
    hidden: int = 128
    layers: int = 4
    vocabulary: int = 2048

    @property
    def size(self) -> Size:
        heads, intermediate = self.hidden // 32, 8 * self.hidden // 3
        return Size(self.hidden, intermediate, self.layers, heads, self.vocabulary, self.batch, 0, 0.0)

    @property
    def prompts(self) -> list[list[int]]:
        """Prompt lengths from 0.5 to 1.5 times `prompt`."""
        lengths = [round(self.prompt * (0.5 + (7 * i % self.batch) / self.batch)) for i in range(self.batch)]
        return [[(31 * i + 7 * t) % self.vocabulary for t in range(n)] for i, n in enumerate(lengths)]

    @property
    def responses(self) -> list[list[int]]:
        """Response lengths from half of `response` to all of it."""
        lengths = [round(self.response * (0.5 + (3 * i % self.batch) / self.batch / 2)) for i in range(self.batch)]
        return [[(13 * i + 5 * t) % self.vocabulary for t in range(n)] for i, n in enumerate(lengths)]


AXES: dict[str, Sequence[int]] = {
    "batch": (16, 32, 64, 128),
    "response": (32, 64, 128, 256),
    "hidden": (64, 128, 256, 512),
    "layers": (2, 4, 8, 16),
    "vocabulary": (2048, 4096, 8192, 16384),
}
NAMES = {"response": "response length", "hidden": "hidden size"}
ROUNDS = 5


def main() -> None:
    """Measure and write all curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    torch.set_num_threads(1)
    limits = measure()
    rows = []
    for axis in args.only:
        # The prompt is short when the response grows; its constant part would flatten the curve.
        base = Point(prompt=8) if axis == "response" else Point()
        points = [replace(base, **{axis: value}) for value in AXES[axis]]
        for phase, (make, work) in PHASES.items():
            calls = [make(point) for point in points]
            seconds = best(calls, args.rounds)
            rows.append(
                {
                    "phase": phase,
                    "against": NAMES.get(axis, axis),
                    "at": list(AXES[axis]),
                    "seconds": seconds,
                    "exponent": slope(AXES[axis], seconds),
                    "at_the_end": slope(AXES[axis][-2:], seconds[-2:]),
                    # Growth in the vocabulary has order 1, however small its share is.
                    "expected": max(
                        1.0,
                        slope(AXES[axis][-2:], [sum(work(point).seconds(limits).values()) for point in points[-2:]]),
                    ),
                }
            )
            print(rows[-1], flush=True)
    results = args.work / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "growth.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")


def best(calls: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The minimum processor seconds of each function; they take turns."""
    found = [math.inf] * len(calls)
    for number in range(rounds + 1):
        for i, call in enumerate(calls):
            began = time.process_time()
            call()
            if number:
                found[i] = min(found[i], time.process_time() - began)
    return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms.

    >>> slope([1, 2, 4, 8], [3, 12, 48, 192])
    2.0
    """
    a, b = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    over = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return round(over / sum((x - mean_a) ** 2 for x in a), 6)


# -------------------------------------------------------------------------------------------- phases


def training(point: Point) -> Callable[[], None]:
    """A step of the SFT stage: its backward pass, clipping and optimizer."""
    model = llama(point).train()
    config = SFTConfig.model_validate(
        {
            "artifacts": "unused",
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "training": {"num_steps": 1, "minibatch_size": point.batch},
            "optimizer": {"learning_rate": 1e-5},
        }
    )
    budget = automatic_budget(model, torch.device("cpu"), config.precision)
    stepper, world = build_stepper(model, config.optimizer, 1000), World(0, 1, torch.device("cpu"))
    stage: Any = SimpleNamespace(world=world, loss_scale=LossScale(world.device, config.precision))
    batch = [
        Example(p + r, [False] * len(p) + [True] * len(r), "")
        for p, r in zip(point.prompts, point.responses, strict=True)
    ]

    def step() -> None:
        stages.sft._accumulate(model, batch, budget, config.precision, stage)
        stepper.clip(world)
        stepper.advance()

    return step


def training_work(point: Point) -> Work:
    rows = [(len(p) + len(r), len(r)) for p, r in zip(point.prompts, point.responses, strict=True)]
    return sft_work(point.size, rows)


def rollout(point: Point) -> Callable[[], None]:
    """Sample exactly `response` tokens for each prompt."""
    model = llama(point)
    table = draw_uniforms(0, "growth", 0, point.batch, point.response)

    def run() -> None:
        sample(model, point.prompts, table, Sampling())

    return run


def sampling_work(point: Point) -> Work:
    return rollout_work(point.size, [len(p) for p in point.prompts], [point.response] * point.batch)


def scoring(point: Point) -> Callable[[], None]:
    """Run ref_policy, value model and reward model over the same responses."""
    policy, value_model, reward_model = llama(point), classifier(point), classifier(point)
    models = Models(policy, policy, value_model)
    prompts = [PromptRow("", ids, Record("", "")) for ids in point.prompts]
    responses = [Response(ids, [0.0] * len(ids), False) for ids in point.responses]
    whole = [p.ids + r.ids for p, r in zip(prompts, responses, strict=True)]
    budget = automatic_budget(policy, torch.device("cpu"), "float32")

    @torch.no_grad()
    def run() -> None:
        for part in cut_responses(budget, policy, prompts, responses):
            some, answers = [prompts[i] for i in part], [responses[i] for i in part]
            score_tokens(models, some, answers, Sampling(), "float32")  # ref_policy has the policy's shape
        score_sequences(reward_model, whole, "float32", budget)

    return run


def judging_work(point: Point) -> Work:
    return scoring_work(point.size, [len(p) for p in point.prompts], [len(r) for r in point.responses])


PHASES: dict[str, tuple[Callable[[Point], Callable[[], None]], Callable[[Point], Work]]] = {
    "training step": (training, training_work),
    "rollout": (rollout, sampling_work),
    "scoring": (scoring, judging_work),
}


def automatic_budget(model: PreTrainedModel, device: torch.device, precision: str) -> Budget:
    """The budget of `tokens_per_microbatch: auto`."""
    setting = Setting(device.type)
    held = Held("model", shape_of_loaded(model, precision), setting)

    def phases(tokens: int) -> list[Phase]:
        at_rest = setting.libraries | {"weights": held.weight_bytes, "optimizer": held.moment_bytes}
        return training_phases([held], Batch(tokens, tokens, FULL), at_rest)

    return Budget(auto_tokens(phases, machine_of_run(device, 1), setting), padded=not is_packed(model))


def llama(point: Point) -> PreTrainedModel:
    return ready(LlamaForCausalLM(point.size.config()))


def classifier(point: Point) -> PreTrainedModel:
    return ready(LlamaForSequenceClassification(point.size.config(num_labels=1)))


def ready(model: PreTrainedModel) -> PreTrainedModel:
    prepare(model, torch.device("cpu"))
    return model.eval()


if __name__ == "__main__":
    set_up_process()
    main()
