"""Measure speed on a GPU in bfloat16: SFT, RM, rollouts and a PPO iteration of models with 0.5 B and 1.5 B weights.

    python benchmarks/gpu.py --work DIR [--trl-ppo-python PYTHON]      # under 8 minutes
    python benchmarks/gpu.py --work DIR --device cpu --tiny            # check that every line runs

The models have Qwen2's shapes and random weights. For each: model FLOPs utilisation of a training step of SFT and RM,
relative to a product of large bfloat16 matrices measured here; rollout tokens per second, compared with HF `generate`,
HF continuous batching, and the limit of reading weights, keys and values at the measured bandwidth, with the decoder
used and the time of its steps; one PPO iteration of the stage by phase and, if the Python of an environment with TRL
1.12.0 is given, one of TRL on the same prompts with weights in bfloat16.

Writes DIR/results/gpu.json, which speed_report.py adds to RESULTS.md. Without a CUDA device it prints one line and
ends with exit code 2.
"""

import argparse
import datetime
import gc
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from growth import automatic_budget
from speed import Worker, write_json
from speed_inputs import EOS, Size, optimizer, text, word_tokenizer, write_config, write_lines
from speed_limits import Work, rm_work, rollout_work, scoring_work, sft_work, update_work
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

import stages.rm
import stages.sft
from rlhf_cli.config.ppo import DecoderName
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.encode import Example
from rlhf_cli.data.records import Ranking
from rlhf_cli.decoders.base import UnsupportedError
from rlhf_cli.decoders.choose import decoder_notes
from rlhf_cli.decoders.gpu import static_decoder
from rlhf_cli.environment import set_up_process
from rlhf_cli.models.forward import autocast
from rlhf_cli.models.load import prepare
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import draw, draw_uniforms, sample
from rlhf_cli.training.distributed import World
from rlhf_cli.training.loss_scale import LossScale
from rlhf_cli.training.optimizer import build_stepper

EOS_SCALE = 6.0
"""EOS's embedding is this many times as large as the others', so that random weights end their responses now and then:
its logit then varies so much that about one in fifty is above all others."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    rows: int
    """Rows of a training step."""
    median: int
    longest: int
    rollout_rows: int
    prompt: int
    response: int
    ppo_rows: int
    repeats: int


FULL = Plan(32, 400, 1024, 256, 128, 128, 64, 3)
TINY = Plan(4, 20, 40, 8, 8, 8, 8, 2)
SIZES = {
    "0.5 B": Size(896, 4864, 24, 14, 151936, ppo_batch=64, steps=0, learning_rate=0.0, kv_heads=2),
    "1.5 B": Size(1536, 8960, 28, 12, 151936, ppo_batch=64, steps=0, learning_rate=0.0, kv_heads=2),
}
TINY_SIZES = {"tiny": Size(64, 128, 2, 4, 512, ppo_batch=8, steps=0, learning_rate=0.0, kv_heads=2)}
DECODER: dict[str, DecoderName] = {"cuda": "static", "cpu": "plain"}
"""Both sides compute in bfloat16, which the paged decoder of a CPU does not."""
GOALS = {"mfu": 0.5, "limit": 0.5, "ppo": 5.0}


def main() -> None:
    """Measure, print a table and write it."""
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu.py: torch sees no CUDA device, nothing was measured. To check the script: --device cpu --tiny",
            file=sys.stderr,
        )
        raise SystemExit(2)
    bench = Bench(torch.device(args.device), TINY if args.tiny else FULL, args.work.resolve(), args.trl_ppo_python)
    began = time.perf_counter()
    rows: list[list[str]] = []
    for name, size in (TINY_SIZES if args.tiny else SIZES).items():
        for measure in (bench.sft, bench.rm, bench.rollouts, bench.ppo):
            for row in measure(name, size):
                rows.append([name, *row])
                print(*rows[-1], sep=" | ", flush=True)
            bench.forget()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    found = {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__},
        "flops": bench.flops,
        "bandwidth": bench.bandwidth,
        "minutes": (time.perf_counter() - began) / 60,
        "head": ["model", "work", "figure", "share of the limit, or ratio", "goal", "how"],
        "rows": rows,
    }
    results = args.work / "results"
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / "gpu.json", found)
    print(f"{found['minutes']:.1f} minutes, {bench.flops / 1e12:.3g} TFLOPS, {bench.bandwidth / 1e9:.4g} GB/s")


class Bench:
    """The device, its limits and the measurements on it."""

    def __init__(self, device: torch.device, plan: Plan, work: Path, trl_python: Path | None):
        self.device, self.plan, self.work, self.trl_python = device, plan, work, trl_python
        self.precision = "bfloat16"
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

    def forget(self) -> None:
        """Free what the previous phase held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> str:
        if self.device.type != "cuda":
            return "no GPU memory"
        return f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"

    # -------------------------------------------------------------------------------------- phases

    def sft(self, name: str, size: Size) -> list[list[str]]:  # noqa: ARG002
        """Model FLOPs utilisation of a step of the SFT stage, optimizer included."""
        plan, model = self.plan, self.model(Qwen2ForCausalLM, size).train()
        lengths = self.lengths(plan.rows)
        batch = [Example(ids(n, i, size), [t >= n // 2 for t in range(n)], "") for i, n in enumerate(lengths)]
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

    def rm(self, name: str, size: Size) -> list[list[str]]:  # noqa: ARG002
        """The same for the RM stage, on pairs whose prompt is half of the text."""
        plan, model = self.plan, self.model(Qwen2ForSequenceClassification, size).train()
        lengths = self.lengths(plan.rows // 2)
        row = Ranking("", ("a", "b"), "")
        batch = []
        for i, n in enumerate(lengths):
            prompt = ids(n // 2, i, size)
            batch.append(RankedIds([prompt + ids(n - n // 2, i + 1, size), prompt + ids(n - n // 2, i + 2, size)], row))
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

    def rollouts(self, name: str, size: Size) -> list[list[str]]:  # noqa: ARG002
        """Sample without EOS, so that both sides generate the same number of tokens."""
        plan, model = self.plan, self.model(Qwen2ForCausalLM, size)
        prompts = [ids(plan.prompt, i, size) for i in range(plan.rollout_rows)]
        table = draw_uniforms(0, "gpu", 0, len(prompts), plan.response)
        count = plan.rollout_rows * plan.response

        def ours() -> None:
            with torch.no_grad(), autocast(self.device, self.precision):
                sample(model, prompts, table, Sampling(decoder=DECODER[self.device.type]))

        our_seconds = self.median(ours)
        with autocast(self.device, self.precision):
            tier = (
                "; ".join(decoder_notes(model, plan.prompt + plan.response, DECODER[self.device.type]))
                or "fast decoder"
            )
        parts = self.step_parts(model, prompts)
        plain = self.model(Qwen2ForCausalLM, size, packed=False).to(torch.bfloat16)
        inputs = torch.tensor(prompts, device=self.device)

        def generate() -> None:
            plain.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                top_k=0,
                min_new_tokens=plan.response,
                max_new_tokens=plan.response,
                pad_token_id=0,
            )

        their_seconds = self.median(generate)
        batching_seconds = self.median(lambda: self.continuous_batching(plain, prompts))
        work = rollout_work(size, [plan.prompt] * len(prompts), [plan.response] * len(prompts), number_bytes=2)
        limit = max(work.flops / self.flops, work.bytes / self.bandwidth)
        return [
            [
                f"rollouts, batch {plan.rollout_rows}",
                f"{count / our_seconds:,.0f} tokens/s",
                f"{limit / our_seconds:.1%} of the limit",
                f"{GOALS['limit']:.0%}",
                f"{tier}; limit {count / limit:,.0f} tokens/s, {self.memory()}",
            ],
            parts,
            [
                "HF generate, bfloat16 weights",
                f"{count / their_seconds:,.0f} tokens/s",
                f"ours is {their_seconds / our_seconds:.2f}x",
                "",
                f"{limit / their_seconds:.1%} of the limit",
            ],
            [
                "HF continuous batching, bfloat16 weights",
                f"{count / batching_seconds:,.0f} tokens/s",
                f"ours is {batching_seconds / our_seconds:.2f}x",
                "",
                f"{limit / batching_seconds:.1%} of the limit",
            ],
        ]

    def continuous_batching(self, model: Qwen2ForCausalLM, prompts: list[list[int]]) -> None:
        """Sample with transformers' paged cache, which starts new rows beside others; without EOS."""
        no_end = -1
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=self.plan.response, eos_token_id=no_end, pad_token_id=0
        )
        memory = ContinuousBatchingConfig(max_memory_percent=0.02) if self.plan is TINY else None
        model.generate_batch(prompts, generation_config=config, continuous_batching_config=memory)

    @torch.no_grad()
    def step_parts(self, model: PreTrainedModel, prompts: list[list[int]]) -> list[str]:
        """The parts of a rollout step: the graph, the draw, and the recording of the graph."""
        what = "one step of a rollout"
        with autocast(self.device, self.precision):
            try:
                decoder = static_decoder(model, self.plan.prompt + self.plan.response, len(prompts))
            except UnsupportedError as reason:
                return [what, "unmeasured", "", "", str(reason)]
            some = prompts[: decoder.most_rows]
            new = torch.zeros(len(some), dtype=torch.int64, device=self.device)
            reading = self.seconds(lambda: decoder.admit(some))
            first = self.seconds(lambda: decoder.step(new))
            replayed = min(self.seconds(lambda: decoder.step(new)) for _ in range(5))
            u = torch.rand(len(some), device=self.device)
            drawn = min(self.seconds(lambda: draw(decoder.logits[: len(some)], u, 1.0)) for _ in range(5))
        how = f"its first {1e3 * first:.1f} ms (records the graph), prompts read in {1e3 * reading:.1f} ms"
        return [what, f"{1e3 * replayed:.2f} ms", f"the draw {1e3 * drawn:.2f} ms", "", how]

    def ppo(self, name: str, size: Size) -> list[list[str]]:
        """One iteration of the PPO stage, then one of TRL's trainer on the same prompts."""
        plan, folder = self.plan, self.work / "gpu" / name.replace(" ", "")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tokenizer = word_tokenizer(size.vocabulary)
        self.save(Qwen2ForCausalLM, size, tokenizer, folder / "policy")
        self.save(Qwen2ForSequenceClassification, size, tokenizer, folder / "reward")
        steps = plan.repeats + 2
        prompts = [ids(plan.prompt, i, size) for i in range(plan.ppo_rows * steps)]
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
            "policy": str(folder / "policy"),
            "reward_model": str(folder / "reward"),
            "value_model": str(folder / "reward"),
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

    # -------------------------------------------------------------------------------------- models

    def model(self, kind: Any, size: Size, *, packed: bool = True) -> PreTrainedModel:
        """A model with random weights, created on the device."""
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            vocab_size=size.vocabulary,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS,
            num_labels=1,
        )
        with self.device:
            model: PreTrainedModel = kind(config)
        if packed:
            prepare(model, self.device)
        return model.eval()

    def save(self, kind: Any, size: Size, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a model directory; weights in bfloat16 halve the time to write and read them."""
        model = self.model(kind, size, packed=False).to(torch.bfloat16)
        if kind is Qwen2ForCausalLM:
            with torch.no_grad():
                model.get_input_embeddings().weight[EOS] *= EOS_SCALE
            model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=EOS)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def ppo_config(self, folder: Path, iterations: int) -> dict[str, Any]:
        plan = self.plan
        return {
            "artifacts": str(folder / "artifacts"),
            "device": self.device.type,
            "precision": self.precision,
            "policy": {"path": str(folder / "policy")},
            "rewards": [{"type": "reward_model", "path": str(folder / "reward")}],
            "value_model": {"path": str(folder / "reward")},
            "data": {"train": str(folder / "prompts.jsonl"), "test_fraction": 0},
            "rollout": {"max_new_tokens": plan.response, "temperature": 1.0},
            "ppo": {
                "num_iterations": iterations,
                "rollout_batch_size": plan.ppo_rows,
                "minibatch_size": plan.ppo_rows,
                "vf_coef": 0.1,
            },
            "optimizer": optimizer(1e-6),
            "checkpoints": {"every_minutes": None},
        }

    def lengths(self, count: int) -> list[int]:
        """Lognormal lengths with the plan's median and sigma 0.6."""
        draw = torch.Generator().manual_seed(0)
        found = (torch.randn(count, generator=draw) * 0.6 + math.log(self.plan.median)).exp()
        return [int(n) for n in found.clamp(8, self.plan.longest)]


def ids(count: int, number: int, size: Size) -> list[int]:
    """Random token ids, different for each number."""
    return [4 + (7919 * number + 31 * t) % (size.vocabulary - 4) for t in range(count)]


def stage_config(rows: int) -> dict[str, Any]:
    """A minimal config of a stage; its paths are not read."""
    return {
        "artifacts": "unused",
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "training": {"num_steps": 1, "minibatch_size": rows},
        "optimizer": optimizer(1e-6),
    }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, to check that every line runs")
    parser.add_argument("--trl-ppo-python", type=Path, help="Python of an environment with TRL 1.12.0")
    return parser.parse_args()


if __name__ == "__main__":
    set_up_process()
    main()
