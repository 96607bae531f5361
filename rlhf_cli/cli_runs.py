"""The commands about runs: watch, eval, diagnose, compare, report, chat, generate, merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhf_cli.cli_data import (
    ARGUMENTS,
    SOURCE_HELP,
    Device,
    Format,
    Keys,
    OnBadRow,
    Out,
    RestartOut,
    Seed,
    SourceCommand,
    SourceSet,
    TopP,
    source_of,
)
from rlhf_cli.cli_options import NumProcesses, Quiet, exit_with

WritingStage = Annotated[
    Literal["sft", "ppo", "rm"] | None,  # rm has an error of its own: it writes no text
    typer.Option(
        "--stage", metavar="[sft|ppo]", help="The stage that responds; ppo by default, or sft.", show_default=False
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. The run's own by default.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        help="Longest response. The run's own by default; outside of a run 256, or what fits.",
    ),
]
BestOf = Annotated[
    int, typer.Option("--best-of", min=1, metavar="N", help="Sample N responses, write the best by score.")
]
PenaltyAlpha = Annotated[
    float | None,
    typer.Option("--penalty-alpha", min=0, max=1, help="Contrastive search among --top-k tokens (4)."),
]


Compared = Annotated[
    Literal["base", "sft"] | None,
    typer.Option("--compare", help="Also write the responses of this model of the run.", show_default=False),
]
Shard = Annotated[
    str | None, typer.Option("--shard", metavar="I/N", help="Every Nth row from row I: one of N machines.")
]


def add_run_commands(app: typer.Typer) -> None:
    """Add the commands of this module to `rlhf`."""
    app.command()(watch)
    app.command("eval")(evaluate)
    app.command()(diagnose)
    app.command()(compare)
    app.command()(report)
    app.command()(chat)
    app.command(cls=SourceCommand)(generate)
    app.command()(merge)


def watch(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print a single time.")] = False,
) -> None:
    """Show curves and the latest samples of runs in the terminal, until Ctrl-C."""

    def work() -> None:
        from rlhf_cli.report.watch import watch as show

        show(directories, seconds=seconds, once=once)

    exit_with(work)


def evaluate(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
    stage: Annotated[
        Literal["sft", "rm", "ppo"] | None, typer.Option("--stage", help="Only this stage.", show_default=False)
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Samples per prompt for best-of-n; 0 skips it.")
    ] = 64,
    sampled_prompts: Annotated[int, typer.Option("--sampled-prompts", min=1, help="Prompts that get them.")] = 128,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="Also tasks of lm-evaluation-harness: names or YAML files, with commas."),
    ] = None,
    rm_bench: Annotated[
        Path | None, typer.Option("--rm-bench", help="Rows of RewardBench 2 for the reward model.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option("--judge", metavar="URL", help="A chat server that compares SFT's and PPO's replies.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option("--judge-model", help="The model's name on that server.")] = None,
    judge_key_env: Annotated[
        str | None, typer.Option("--judge-key-env", help="The environment variable with its API key.")
    ] = None,
    judge_template: Annotated[
        Path | None, typer.Option("--judge-template", help="The question, with {prompt}, {a} and {b}.")
    ] = None,
    judge_tokens: Annotated[int, typer.Option("--judge-tokens", min=1, help="Longest answer of the judge.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the replies and of the intervals.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Where to run.")] = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure the finished stages of a run on held-out data."""

    def work() -> None:
        from rlhf_cli.commands.judge import JudgeOptions, judge_of
        from rlhf_cli.evaluation.evaluate import Settings
        from rlhf_cli.evaluation.evaluate import evaluate as measure

        chosen = [name.strip() for name in (tasks or "").split(",") if name.strip()]
        model = judge_of(JudgeOptions(judge, judge_model, judge_template, judge_key_env, judge_tokens))
        settings = Settings(stage, samples, sampled_prompts, seed, device, chosen, rm_bench, model)
        measure(directory, settings, quiet=quiet)

    exit_with(work)


def diagnose(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Read files only: load no model and call no judge.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Where to run.")] = "auto",
) -> None:
    """Name the stage of a run that is at fault, with the evidence and what to try. Nothing is trained.

    Exit code 0: no fault was found. 2: at least one was named, or the directory is wrong.
    """

    def work() -> None:
        from rlhf_cli.diagnosis.diagnose import diagnose as examine

        examine(directory, device=device, files_only=files_only, as_json=as_json)

    exit_with(work)


def compare(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR DIR...", help="Runs that `rlhf eval` measured.")],
) -> None:
    """Compare the PPO policies of several runs on the same prompts."""

    def work() -> None:
        from rlhf_cli.evaluation.compare import compare as show

        show(directories)

    exit_with(work)


def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The HTML file; report.html in the first directory by default.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also write the main curves as a PNG.")] = None,
) -> None:
    """Write a page about one or several runs: curves, figures, samples, findings."""

    def work() -> None:
        from rlhf_cli.printing import say
        from rlhf_cli.report.page import write_report

        path = out or directories[0] / "report.html"
        write_report(directories, path, png)
        say(path)
        if png is not None:
            say(png)

    exit_with(work)


def chat(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any language model.")],
    stage: WritingStage = None,
    compare_stages: Annotated[
        bool, typer.Option("--compare", help="sft and ppo answer side by side, with the score of each reward.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. The run's own by default.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Longest reply. The run's own by default.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the replies.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Where to run.")] = "auto",
) -> None:
    """Talk to a model that you trained. /help lists the commands of the conversation."""

    def work() -> None:
        from rlhf_cli.commands.chat import chat as talk

        talk(
            directory,
            stage,
            compare=compare_stages,
            seed=seed,
            device=device,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )

    exit_with(work)


def generate(
    context: typer.Context,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any language model.")],
    prompts: Annotated[str, typer.Option("--prompts", metavar="FILE", help=SOURCE_HELP, show_default=False)],
    out: Out,
    stage: WritingStage = None,
    compared: Compared = None,
    temperature: Temperature = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the K most likely tokens.")] = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    best_of: BestOf = 1,
    reward_model: Annotated[
        str | None,
        typer.Option("--reward-model", metavar="DIR", help="Score with this model, not with the run's rewards."),
    ] = None,
    beams: Annotated[int, typer.Option("--beams", min=1, help="Beam search with this many beams.")] = 1,
    penalty_alpha: PenaltyAlpha = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Responses per batch.")] = 64,
    shard: Shard = None,
    nproc: NumProcesses = 1,
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum rows.")] = None,
    device: Device = "auto",
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Let a trained model respond to the prompts of a file."""

    def work() -> None:
        from rlhf_cli.commands.generate import Options
        from rlhf_cli.commands.generate import generate as write
        from rlhf_cli.training.processes import is_worker, run_again

        if nproc > 1 and not is_worker():
            run_again(["generate", *context.meta[ARGUMENTS]], nproc)
            return
        sampling = (temperature, top_k, top_p, max_new_tokens)
        options = Options(*sampling, best_of, reward_model, beams, penalty_alpha, seed, batch_size, device)
        write(
            directory,
            source_of(prompts, overrides, format, keys),
            out,
            options,
            stage=stage,
            compare=compared,
            shard=shard,
            num=num,
            on_bad_row=on_bad_row,
            restart=restart,
            quiet=quiet,
            in_several_processes=nproc > 1,
        )

    exit_with(work)


def merge(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A finished stage, or a directory of adapters.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option("--dtype", help="Number format of the weights: auto is bfloat16 if the base model is."),
    ] = "auto",
) -> None:
    """Merge LoRA adapters into plain weights (stages with lora.save: adapter)."""

    def work() -> None:
        from rlhf_cli.commands.merge import merge as write

        write(directory, out, dtype)

    exit_with(work)
