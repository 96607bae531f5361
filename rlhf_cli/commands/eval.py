"""`rlhf eval`, and the judge of its `--judge`: a language model on a chat server that compares two replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhf_cli.commands.data_score import COMPARE_TEMPLATE, Unclear, Verdict, ask, letter_in
from rlhf_cli.commands.options import Device, Quiet
from rlhf_cli.commands.writer import Failure, Request, ServerWriter, WriterOptions, read_template
from rlhf_cli.data.records import fill
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.report.progress import Display
from rlhf_cli.rewards.chat_client import OptionNames

NAMES = OptionNames("--judge", "--judge-key-env", "The other figures are written; run the same command to ask again")


@dataclass(frozen=True)
class EvalJudgeOptions:
    url: Annotated[
        str | None, typer.Option("--judge", metavar="URL", help="A chat server that compares SFT's and PPO's replies.")
    ] = None
    model: Annotated[str | None, typer.Option("--judge-model", help="The model's name on that server.")] = None
    key_env: Annotated[
        str | None, typer.Option("--judge-key-env", help="The environment variable with its API key.")
    ] = None
    template: Annotated[
        Path | None, typer.Option("--judge-template", help="The question, with {prompt}, {a} and {b}.")
    ] = None
    max_new_tokens: Annotated[int, typer.Option("--judge-tokens", min=1, help="Longest answer of the judge.")] = 16
    attempts: int = 3  # requests until an answer names exactly one of A and B


def evaluate(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
    judge: EvalJudgeOptions,
    stage: Annotated[
        Literal["sft", "rm", "ppo"] | None, typer.Option("--stage", help="Only this stage.", show_default=False)
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Samples per prompt for best-of-n; 0 skips it.")
    ] = 64,
    sampled_prompts: Annotated[int, typer.Option("--sampled-prompts", min=1, help="Prompts that get them.")] = 128,
    rm_bench: Annotated[
        Path | None, typer.Option("--rm-bench", help="Rows of RewardBench 2 for the reward model.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=-(2**63), max=2**64 - 1, help="Seed of the replies and of the intervals.")
    ] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure the finished stages of a run on held-out data."""
    from rlhf_cli.evaluation import evaluate as measured
    from rlhf_cli.evaluation.benchmark import read_bench
    from rlhf_cli.evaluation.figures import Sentences
    from rlhf_cli.evaluation.reward_model import measure_reward_model
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.run import open_run

    server = judge_of(judge)
    run = open_run(directory, stage=stage, device=start(device).device, seed=seed)
    stages = run.stages if stage is None else [stage]
    display = Display("eval", quiet=quiet)
    for option, value, needed in (("--rm-bench", rm_bench, "rm"), ("--judge", server, "ppo")):
        if value is not None and needed not in stages:
            raise ConfigError(f"{option}: needs the stage {needed}, which is not evaluated here. Remove the option")
    bench = None if rm_bench is None else (rm_bench.name, read_bench(rm_bench))
    for one in stages:
        match one:
            case "sft":
                report = measured.measure_sft(run, display)
            case "rm":
                report = measure_reward_model(run, bench, display)
            case _:
                report = measured.measure_ppo(run, samples, sampled_prompts, display)
        path = measured.write_evaluation(run, one, report)
        if one == "ppo" and server is not None:  # After everything else is written: a server can fail.
            measured.judge_replies(report, server.name, server.compare, Sentences(display))
            measured.write_evaluation(run, one, report)
        display.note(f"written to {path}")


def judge_of(options: EvalJudgeOptions) -> ServerJudge | None:
    """The judge; None without `--judge`. Raises ConfigError for options that do not fit or that nothing would read."""
    if options.url is not None and options.model is not None:
        return ServerJudge(options, options.url, options.model)
    if options.url is not None:
        raise ConfigError("--judge-model: is missing. Give the model's name on the --judge server")
    if options != EvalJudgeOptions():
        raise ConfigError("--judge: is missing, so the other --judge options do nothing. Give the server's base URL")
    return None


class ServerJudge:
    """Asks the model which of two replies is better, at temperature 0; a question without an answer is asked again."""

    def __init__(self, options: EvalJudgeOptions, url: str, model: str):
        self.name, self.attempts = model, options.attempts
        needed = ["prompt", "a", "b"]
        self.template = read_template(options.template, needed, "--judge-template") or COMPARE_TEMPLATE
        tokens = options.max_new_tokens
        writer = WriterOptions(model, url, options.key_env, temperature=0.0, max_new_tokens=tokens)
        self.writer = ServerWriter(writer, NAMES)

    def compare(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict | None]:
        """The better reply of each pair, as `Compare` says. Raises RunError if the judge cannot be asked."""
        questions = [
            Request.of(fill(self.template, prompt=prompt.strip(), a=a.strip(), b=b.strip()), number)
            for number, (prompt, a, b) in enumerate(pairs)
        ]
        found: list[Verdict | None] = []
        for answer in ask(self.writer, questions, letter_in, self.attempts):
            if isinstance(answer, Failure) and answer.fatal:
                raise RunError(f"--judge: {answer.reason}")
            found.append(None if isinstance(answer, Failure | Unclear) else answer)
        return found
