"""Speed on a GPU in bfloat16: steps of SFT and RM, rollouts, and an iteration of PPO. Parts of gpu.py.

Model FLOPs utilisation of a training step of SFT and RM, relative to a product of large bfloat16 matrices measured
here. Rollout tokens per second of each decoder, compared with HF `generate`, HF continuous batching, and the limit of
reading weights, keys and values at the measured bandwidth; the time of a step of the decoder. One PPO iteration of the
stage by phase. If the Python of an environment with TRL 1.12.0 is given, also one of TRL on the same prompts, with
weights in bfloat16.
"""

import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_inputs import TINY, Inputs
from growth import automatic_budget
from speed import Worker
from speed_inputs import optimizer, text, write_config, write_lines
from speed_limits import Work, rm_work, rollout_work, scoring_work, sft_work, update_work
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import stages.rm
import stages.sft
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.encode import Example
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.models.forward import autocast
from rlhf_cli.processes.distributed import World
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from rlhf_cli.training.bad_steps import LossScale
from rlhf_cli.training.optimizer import build_stepper

HEAD = ["model", "work", "figure", "share of the limit, or ratio", "goal", "remarks"]
GOALS = {"mfu": 0.5, "limit": 0.5, "ppo": 5.0}


class Bench:
    """The device, its limits and the measurements on it."""

    def __init__(self, inputs: Inputs, trl_python: Path | None):
        self.inputs, self.trl_python = inputs, trl_python
        self.device, self.plan, self.size, self.precision = inputs.device, inputs.plan, inputs.size, "bfloat16"
        self.flops, self.bandwidth = self.peak()

    # ------------------------------------------------------------------------------------ measuring

    def peak(self) -> tuple[float, float]:
        """(operations per second of a large bfloat16 product, bytes per second of a copy), each the best of several."""
        n, m = (256, 2**20) if self.plan is TINY else (8192, 2**30)
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.zeros(m, device=self.device, dtype=torch.uint8)
        target = torch.empty_like(source)
        product = min(self.seconds(lambda: a @ b) for _ in range(10))
        copy = min(self.seconds(lambda: target.copy_(source)) for _ in range(10))
        return 2 * n**3 / product, 2 * m / copy

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, including all of its kernels."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def median(self, call: Callable[[], Any]) -> float:
        """Seconds of several calls after a warm-up."""
        call()
        return statistics.median(self.seconds(call) for _ in range(self.plan.repeats))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> str:
        if self.device.type != "cuda":
            return "no GPU memory"
        return f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"

    # -------------------------------------------------------------------------------------- phases

    def sft(self) -> list[list[str]]:
        """Model FLOPs utilisation of a step of the SFT stage, optimizer included."""
        plan, size, model = self.plan, self.size, self.inputs.model(LlamaForCausalLM).train()
        lengths = self.lengths(plan.rows)
        batch = [Example(self.inputs.ids(n, i), [t >= n // 2 for t in range(n)], "") for i, n in enumerate(lengths)]
        config = SFTConfig.model_validate(stage_config(plan.rows) | {"precision": self.precision})
        budget = automatic_budget(model, self.device, self.precision)
        stepper, world = build_stepper(model, config.optimizer, 1000), World(0, 1, self.device)
        stage: Any = SimpleNamespace(world=world, loss_scale=LossScale(self.device, self.precision))

        def step() -> None:
            stages.sft._accumulate(model, batch, budget, self.precision, stage)
            stepper.clip(world)
            stepper.advance()

        work = sft_work(size, [(n, n - n // 2) for n in lengths])
        return [self.utilisation("SFT step", self.median(step), work, sum(lengths))]

    def rm(self) -> list[list[str]]:
        """The same for the RM stage, on pairs whose prompt is half of the text."""
        plan, size, model = self.plan, self.size, self.inputs.model(LlamaForSequenceClassification).train()
        lengths = self.lengths(plan.rows // 2)
        row, ids = Record("", "", (Answer("a"), Answer("b"))), self.inputs.ids
        batch = []
        for i, n in enumerate(lengths):
            prompt, answers = ids(n // 2, i), [ids(n - n // 2, i + k) for k in (1, 2)]
            batch.append(RankedIds([prompt + answer for answer in answers], row))
        config = RMConfig.model_validate(stage_config(len(batch)) | {"precision": self.precision})
        budget = automatic_budget(model, self.device, self.precision)
        stepper, world = build_stepper(model, config.optimizer, 1000), World(0, 1, self.device)
        stage: Any = SimpleNamespace(world=world, loss_scale=LossScale(self.device, self.precision))

        def step() -> None:
            stages.rm._accumulate(model, batch, stages.rm.TargetScale(0.0, 1.0), budget, config, stage)
            stepper.clip(world)
            stepper.advance()

        work = rm_work(size, [(n // 2, n, n) for n in lengths])
        return [self.utilisation("RM step", self.median(step), work, 2 * sum(lengths))]

    def utilisation(self, what: str, seconds: float, work: Work, tokens: int) -> list[str]:
        share = work.flops / seconds / self.flops
        how = f"{1e3 * seconds:,.0f} ms, {self.memory()}"
        return [what, f"{tokens / seconds:,.0f} tokens/s", f"MFU {share:.1%}", f"{GOALS['mfu']:.0%}", how]

    def rollouts(self) -> list[list[str]]:
        """Sample without EOS, so that both sides generate the same number of tokens."""
        plan, size, ids, model = self.plan, self.size, self.inputs.ids, self.inputs.model(LlamaForCausalLM)
        prompts = [ids(plan.prompt, i) for i in range(plan.rollout_rows)]
        table = draw_uniforms(0, "gpu", 0, len(prompts), plan.response)
        count = plan.rollout_rows * plan.response

        work = rollout_work(size, [plan.prompt] * len(prompts), [plan.response] * len(prompts), number_bytes=2)
        limit = max(work.flops / self.flops, work.bytes / self.bandwidth)
        seconds: dict[str, float | None] = {}
        rows: list[list[str]] = []

        def measure(what: str, call: Callable[[], Any]) -> None:
            """Add a row. One side that cannot run does not hide the others."""
            try:
                one = seconds[what] = self.median(call)
            except Exception as error:
                rows.append(
                    [what, "failed", "", "", f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")]
                )
                return
            first = next(iter(seconds.values()))
            ratio = "" if len(seconds) == 1 or first is None else f"ours is {one / first:.2f}x"
            share = f"{limit / one:.1%} of the limit of {count / limit:,.0f} tokens/s, {self.memory()}"
            rows.append(
                [what, f"{count / one:,.0f} tokens/s", ratio, f"{GOALS['limit']:.0%}" if not ratio else "", share]
            )

        def ours() -> None:
            with torch.no_grad(), autocast(self.device, self.precision):
                sample(model, prompts, table, Sampling())

        measure(f"rollouts, batch {plan.rollout_rows}", ours)
        unpacked = self.inputs.model(LlamaForCausalLM, packed=False).to(torch.bfloat16)
        inputs = torch.tensor(prompts, device=self.device)

        def generate() -> None:
            unpacked.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                top_k=0,
                min_new_tokens=plan.response,
                max_new_tokens=plan.response,
                pad_token_id=0,
            )

        measure("HF generate, bfloat16 weights", generate)
        measure("HF continuous batching, bfloat16 weights", lambda: self.continuous_batching(unpacked, prompts))
        return rows

    def continuous_batching(self, model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
        """Sample with transformers' paged cache, which starts new rows beside others; without EOS."""
        no_end = -1
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=self.plan.response, eos_token_id=no_end, pad_token_id=0
        )
        memory = ContinuousBatchingConfig(max_memory_percent=0.02) if self.plan is TINY else None
        model.generate_batch(prompts, generation_config=config, continuous_batching_config=memory)

    def ppo(self) -> list[list[str]]:
        """One iteration of the PPO stage, then one of TRL's trainer on the same prompts."""
        plan, size, inputs = self.plan, self.size, self.inputs
        folder = inputs.folder / "ppo speed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        steps = plan.repeats + 2
        prompts = [self.inputs.ids(plan.prompt, i) for i in range(plan.ppo_rows * steps)]
        write_lines(folder / "prompts.jsonl", [{"prompt": text(prompt)} for prompt in prompts])
        config = write_config(folder / "config.yaml", self.ppo_config(folder, steps))
        common = {"kind": "ppo", "cores": sorted(os.sched_getaffinity(0)), "out": str(folder / "trl")}
        given = common | {"config": str(config), "overrides": [], "kept": str(folder / "first_rollout.json")}
        ours = self.iterations(Worker(Path(sys.executable), "speed_ours.py", given, folder), steps - 1)
        seconds = statistics.median(step["wall_s"] for step in ours)
        step = ours[-1]
        lengths = step["prompt_lengths"], step["response_lengths"]
        sampling = rollout_work(size, *lengths, number_bytes=2)
        parts = (sampling, scoring_work(size, *lengths), update_work(size, *lengths, 1))
        limit = sum(max(part.flops / self.flops, part.bytes / self.bandwidth) for part in parts)
        times = {key: value for key, value in step["metrics"].items() if key.startswith("time/") and key.endswith("_s")}
        phases = ", ".join(f"{key.removeprefix('time/')} {value:.2f}" for key, value in times.items())
        rows = [
            [
                f"PPO iteration, {plan.ppo_rows} episodes",
                f"{plan.ppo_rows / seconds:.2f} episodes/s",
                f"{limit / seconds:.1%} of the limit",
                "",
                f"{phases}; mean response {statistics.fmean(step['response_lengths']):.0f} tokens",
            ]
        ]
        if self.trl_python is None:
            rows.append(["TRL 1.12.0", "unmeasured", "", f"{GOALS['ppo']:g}x", "--trl-ppo-python was not given"])
            return rows
        trl_given = common | {
            "trl": "1.12.0",
            "gpu": self.device.type == "cuda",
            "policy": str(inputs.policy),
            "reward_model": str(inputs.reward),
            "value_model": str(inputs.reward),
            "batches": [prompts[i : i + plan.ppo_rows] for i in range(0, len(prompts), plan.ppo_rows)],
            "microbatch_size": max(1, plan.ppo_rows // 4),
            "epochs": 1,
            "temperature": 1.0,
            "max_new_tokens": plan.response,
            "kl_coef": 0.05,
            "vf_coef": 0.1,
            "learning_rate": 1e-6,
        }
        trl = self.iterations(Worker(self.trl_python, "speed_trl.py", trl_given, folder), steps - 1)
        theirs = statistics.median(step["wall_s"] for step in trl)
        rows.append(
            [
                "TRL 1.12.0, bfloat16 weights",
                f"{plan.ppo_rows / theirs:.2f} episodes/s",
                f"ours is {theirs / seconds:.2f}x",
                f"{GOALS['ppo']:g}x",
                f"mean response {statistics.fmean(trl[-1]['response_lengths']):.0f} tokens",
            ]
        )
        return rows

    def iterations(self, worker: Worker, count: int) -> list[dict[str, Any]]:
        """Run a worker; returns its steps after the first."""
        try:
            worker.wait()
            return [worker.ask("go") for _ in range(count)][1:]
        finally:
            worker.end()

    # -------------------------------------------------------------------------------------- inputs

    def ppo_config(self, folder: Path, iterations: int) -> dict[str, Any]:
        plan, inputs = self.plan, self.inputs
        return inputs.stage_config(folder / "artifacts") | {
            "policy": {"path": str(inputs.policy)},
            "rewards": [{"type": "reward_model", "path": str(inputs.reward)}],
            "value_model": {"path": str(inputs.reward)},
            "data": {"train": str(folder / "prompts.jsonl"), "test_fraction": 0},
            "rollout": {"max_new_tokens": plan.response, "temperature": 1.0},
            "ppo": {
                "num_iterations": iterations,
                "rollout_batch_size": plan.ppo_rows,
                "minibatch_size": plan.ppo_rows,
                "vf_coef": 0.1,
            },
        }

    def lengths(self, count: int) -> list[int]:
        """Lognormal lengths with the plan's median and sigma 0.6."""
        draw = torch.Generator().manual_seed(0)
        found = (torch.randn(count, generator=draw) * 0.6 + math.log(self.plan.median)).exp()
        return [int(n) for n in found.clamp(8, self.plan.longest)]


def stage_config(rows: int) -> dict[str, Any]:
    """A minimal config of a stage; its paths are not read."""
    return {
        "artifacts": "unused",
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "training": {"num_steps": 1, "minibatch_size": rows},
        "optimizer": optimizer(1e-6),
    }
