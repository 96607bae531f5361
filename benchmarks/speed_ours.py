"""Our side of benchmarks/speed.py: a stage, or the sampler, one step whenever the driver asks for one.

    python benchmarks/speed_ours.py TASK.json

Calls the stage's `run(config)` with a config file. It waits where a step ends, inside `StageRun.finish_step`;
everything between two of these is timed.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

TASK = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

from speed_gate import Facts, Gate  # noqa: E402

GATE = Gate(TASK["cores"])  # Before torch counts the cores.

from rlhf_cli.processes.environment import set_up_process  # noqa: E402

set_up_process()  # Before torch is imported, as in the `rlhf` command.

import torch  # noqa: E402

import stages.ppo  # noqa: E402
import stages.rm  # noqa: E402
import stages.sft  # noqa: E402
from rlhf_cli.config.loader import load_config  # noqa: E402
from rlhf_cli.config.ppo import PPOConfig  # noqa: E402
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig  # noqa: E402
from rlhf_cli.models.forward import autocast  # noqa: E402
from rlhf_cli.models.load import load_policy, load_tokenizer, prepare  # noqa: E402
from rlhf_cli.processes.threads import use_threads  # noqa: E402
from rlhf_cli.rollout.sampling import (  # noqa: E402
    Sampling,
    draw_uniforms,
    sample,
    stop_ids,
)
from rlhf_cli.run.stage_run import StageRun  # noqa: E402


def main() -> None:
    """Run the task until the driver ends it."""
    use_threads(len(TASK["cores"]))  # as a stage does
    GATE.mark_base()
    {"sft": sft, "rm": rm, "ppo": ppo, "rollout": rollout}[TASK["kind"]]()


def sft() -> None:
    """Run the SFT stage."""
    seen = watch(stages.sft, "_accumulate")

    def facts() -> Facts:
        ids = [list(example.ids) for example in seen["_accumulate"][0][1]]
        return {
            "units": sum(map(len, ids)),
            "loss": METRICS["loss/sft"],
            "batch": digest(ids),
            "work": [[len(e.ids), sum(e.loss_mask)] for e in seen["_accumulate"][0][1]],
            "metrics": METRICS,
        }

    stop_at_steps(facts)
    stages.sft.run(load_config(TASK["config"], SFTConfig, TASK["overrides"]), quiet=True, restart=True)


def rm() -> None:
    """Run the RM stage."""
    seen = watch(stages.rm, "_accumulate")

    def facts() -> Facts:
        batch = seen["_accumulate"][0][1]
        ids = [list(item.answers[0]) for item in batch] + [list(item.answers[1]) for item in batch]
        return {
            "units": len(batch),
            "loss": METRICS["loss/rm"],
            "batch": digest(ids),
            "work": [[shared(*item.answers), *map(len, item.answers)] for item in batch],
            "metrics": METRICS,
        }

    stop_at_steps(facts)
    stages.rm.run(load_config(TASK["config"], RMConfig, TASK["overrides"]), quiet=True, restart=True)


def ppo() -> None:
    """Run the PPO stage; the first iteration's rollout is kept for TRL to check."""
    seen = watch(stages.ppo, "_rollout", "ask_rewards")
    kept = Path(TASK["kept"])
    kept.unlink(missing_ok=True)

    def facts() -> Facts:
        rollout, scores = seen["_rollout"][1], seen["ask_rewards"][1][1]
        prompts, responses = [list(p.ids) for p in rollout.prompts], [list(r.ids) for r in rollout.responses]
        if not kept.exists():
            lengths = list(map(len, responses))
            found = {
                "prompts": prompts,
                "responses": responses,
                "logprobs": unpadded(rollout.logprobs, lengths),
                "ref_logprobs": unpadded(rollout.ref_logprobs, lengths),
                "values": unpadded(rollout.values, lengths),
                "scores": scores.total.tolist(),
            }
            kept.write_text(json.dumps(found), encoding="utf-8")
        return {
            "units": len(responses),
            "batch": digest(prompts),
            "prompt_lengths": list(map(len, prompts)),
            "response_lengths": list(map(len, responses)),
            "ended": sum(r.ended for r in rollout.responses),
            "kl": METRICS["objective/kl"],
            "score": scores.total.float().mean().item(),
            "metrics": METRICS,
        }

    stop_at_steps(facts)
    stages.ppo.run(load_config(TASK["config"], PPOConfig, TASK["overrides"]), quiet=True, restart=True)


def rollout() -> None:
    """Run the sampler alone, on the same batches of prompts as HF `generate`."""
    tokenizer, policy = load_tokenizer(TASK["policy"]), load_policy(TASK["policy"])
    prepare(policy, torch.device("cpu"))
    sampling = Sampling(temperature=TASK["temperature"], stop=frozenset(stop_ids(policy, tokenizer)))
    GATE.arrive()
    for step, prompts in enumerate(TASK["batches"]):
        table = draw_uniforms(0, "benchmark", step, len(prompts), TASK["max_new_tokens"])
        with torch.no_grad(), autocast(torch.device("cpu"), TASK["precision"]):
            responses = sample(policy, prompts, table, sampling, tokenizer)
        lengths = [len(response.ids) for response in responses]
        given = {
            "units": sum(lengths),
            "batch": digest(prompts),
            "prompt_lengths": list(map(len, prompts)),
            "response_lengths": lengths,
            "ended": sum(response.ended for response in responses),
        }
        GATE.arrive(lambda given=given: given)
    GATE.leave()


METRICS: dict[str, float] = {}
"""The last row of the stage's metrics.jsonl."""


def stop_at_steps(facts: Any) -> None:
    """Make `StageRun` wait at the gate before its first step and after each step."""
    resume, log, finish_step = StageRun.resume, StageRun.log, StageRun.finish_step

    def resume_and_wait(self: StageRun, *given: Any) -> int:
        first = resume(self, *given)
        GATE.arrive()
        return first

    def log_and_remember(self: StageRun, step: int, metrics: dict[str, float], *given: Any) -> None:
        METRICS.clear()
        METRICS.update(metrics)
        log(self, step, metrics, *given)

    def finish_and_wait(self: StageRun, step: int, total: int) -> None:
        finish_step(self, step, total)
        GATE.arrive(facts)

    StageRun.resume = resume_and_wait  # type: ignore[method-assign]
    StageRun.log = log_and_remember  # type: ignore[method-assign]
    StageRun.finish_step = finish_and_wait  # type: ignore[method-assign]


def watch(module: Any, *names: str) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Keep the arguments and the result of each function's last call, by reference."""
    seen: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def watched(name: str) -> Any:
        inner = getattr(module, name)

        def call(*given: Any, **named: Any) -> Any:
            result = inner(*given, **named)
            seen[name] = (given, result)
            return result

        return call

    for name in names:
        setattr(module, name, watched(name))
    return seen


def unpadded(tensor: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    """[B, R] as B lists of each row's real tokens."""
    return [row[:n].tolist() for row, n in zip(tensor, lengths, strict=True)]


def shared(a: list[int], b: list[int]) -> int:
    """The number of tokens that two answers share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def digest(rows: list[list[int]]) -> str:
    """A digest of the rows that does not depend on their order."""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
