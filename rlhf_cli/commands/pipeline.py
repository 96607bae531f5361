"""`rlhf pipeline`: runs the stages of a folder in order, skipping those that are finished and unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.commands.options import NumProcesses, Quiet, StageOverrides, Threads
from rlhf_cli.commands.rounds import Rounds, show
from rlhf_cli.config.by_stage import AnyConfig, load_stage_config, overrides_for, require_stages, stage_files
from rlhf_cli.errors import ConfigError
from rlhf_cli.files import read_object
from rlhf_cli.processes.environment import is_first_worker
from rlhf_cli.program import command, set_options
from rlhf_cli.report.page import write_report
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import read_manifest, stage_directory
from rlhf_cli.run.identity import require_files
from rlhf_cli.run.launch import Run, explained, load_stage, run_stage


def pipeline(
    directory: Annotated[Path, typer.Argument(help="A folder with sft.yaml, rm.yaml and ppo.yaml.")],
    overrides: StageOverrides = None,
    restart: Annotated[bool, typer.Option("--restart", help="Run every stage again.")] = False,
    quiet: Quiet = False,
    nproc: NumProcesses = 1,
    threads: Threads = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, help="Label replies of the policy and train again.")
    ] = 1,
    labels: Annotated[
        str | None,
        typer.Option(
            "--labels",
            metavar="SOURCE",
            help="With --rounds: what scores replies, FILE.py:FUNCTION or a reward in YAML.",
        ),
    ] = None,
    pairs: Annotated[
        int | None, typer.Option("--pairs", min=2, help="With --rounds: pairs to label in each.", show_default="500")
    ] = None,
) -> None:
    """Run the stages of a folder in order, skipping those that are up to date."""
    # A stage that is finished and whose config, data and inputs are unchanged is skipped. A stage that runs changes the
    # inputs of the stages after it, so they run too.
    overrides = [*(overrides or []), *([f"threads={threads}"] if threads else [])]
    files = stage_files(directory)
    require_stages(overrides, files)
    loaded = load_stages(files, overrides)
    roots = {config.artifacts for config in loaded.values()}
    if len(roots) > 1:
        raise ConfigError(f"{directory}: the stages have different `artifacts` ({', '.join(sorted(roots))}). Use one")
    if rounds == 1 and (labels is not None or pairs is not None):
        option = "--pairs" if labels is None else "--labels"
        raise ConfigError(f"{option}: does nothing without --rounds. Add --rounds 2, or remove it")
    plan = Rounds.of(labels, pairs, loaded) if rounds > 1 else None
    is_main = is_first_worker()  # under torchrun every process runs this
    display = Display("pipeline", quiet=quiet, silent=not is_main)
    given = {"--nproc": nproc, "--rounds": rounds, "--labels": labels, "--pairs": pairs}
    again = [str(word) for option, value in given.items() if value not in (None, 1) for word in (option, value)]
    # Without --restart, which would discard the checkpoints.
    resume_with = command("pipeline", str(directory), *set_options(overrides), *again)

    start = partial(run_stage, restart=restart, quiet=quiet, resume_with=resume_with, num_processes=nproc)

    def run(stages: Sequence[str], own: Mapping[str, Sequence[str]]) -> list[str]:
        ran = []
        for number, stage in enumerate(stages, 1):
            load = partial(_load, stage, f"stage {number} of {len(stages)}, {stage}", display)
            if start(stage, load, files[stage], [*overrides_for(stage, overrides), *own.get(stage, ())]):
                ran.append(stage)
        return ran

    root = roots.pop()
    ran, done = run(list(files), {}), [root]
    for number in range(2, rounds + 1):
        assert plan is not None
        display.heading(f"round {number} of {rounds}")
        folder = Path(root) / "rounds" / str(number)
        if not plan.prepare(number, done[-1], folder, display=display, again=resume_with, restart=restart):
            break
        ran = run(["rm", "ppo"], plan.overrides(loaded, root, number))
        done.append(str(folder))
    _show_result(done[-1], list(files), ran, display)
    if rounds > 1:
        show(done, display)
    if is_main:
        if not (Path(done[-1]) / "eval").is_dir():
            display.note(f"for intervals, calibration and best-of-n: {command('eval', done[-1])}")
        draw_report([Path(done[-1])], Path(done[-1]) / "report.html", display)


def load_stages(files: Mapping[str, Path], overrides: Sequence[str]) -> dict[str, AnyConfig]:
    """The configs of the stages of a run. Raises what can be found out before the first stage runs."""
    chosen = {stage: overrides_for(stage, overrides) for stage in files}
    configs = {stage: load_stage_config(stage, file, chosen[stage]) for stage, file in files.items()}
    for stage, config in configs.items():
        with explained(files[stage], config.artifacts, chosen[stage]):
            require_files(config)
        require_lora(stage, configs)
    return configs


def require_lora(stage: str, configs: Mapping[str, AnyConfig], *, here: bool = True) -> None:
    """`require_adapters` for a stage of a run with these configs. Imports torch only if the stage trains adapters."""
    if configs[stage].trains_adapters:
        from rlhf_cli.plan.adapter_errors import require_adapters

        require_adapters(configs[stage], configs, here=here)


def _show_result(root: str, stages: Sequence[str], ran: Sequence[str], display: Display) -> None:
    """A table of the stages, and the comparison of SFT and PPO if the PPO stage did not just print it."""
    rows = []
    for stage in stages:
        manifest = read_manifest(stage_directory(root, stage))
        if manifest is not None:
            seconds = f"{manifest.seconds:.0f}" if stage in ran else "skipped"
            rows.append([stage, seconds, f"{stage_directory(root, stage)}/model"])
    evaluation = read_object(stage_directory(root, "ppo") / "evaluation.json") if "ppo" in stages else {}
    if evaluation and "ppo" not in ran:
        display.before_and_after(evaluation)
    display.table("Pipeline", ["stage", "seconds", "model"], rows, text=("model",))


def draw_report(roots: Sequence[Path], path: Path, display: Display) -> None:
    """Write the report of runs and print its path. The models are finished, so no error ends the command here."""
    try:
        write_report(roots, path)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        again = command("report", *map(str, roots), "--out", str(path))
        display.warn(f"{path}: not written ({reason}). The models are complete. Run: {again}")
        return
    display.note(f"curves, figures and replies, for a browser: {path}")


def _load(stage: str, title: str, display: Display) -> Run:
    display.heading(title)
    return load_stage(stage)
