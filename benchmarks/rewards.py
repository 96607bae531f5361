"""The over-optimisation lab: PPO against a poor reward model on the hard shop-support task, and what helps.

    python benchmarks/rewards.py --work DIR

trains SFT, reward models and PPO for every method and seed, two processes at a time with one thread each. Finished
stages are skipped, so the same command resumes. `--methods NAME ...` and `--seeds 0 1` do a part. The report is
DIR/REWARDS.md, with the processor time of each command in DIR/seconds.jsonl; `--record` writes it beside this script,
and its picture to docs/overoptimization.svg.

The task is `rlhf init DIR --from support-hard`. Gold is the task's own judge on 128 held-out prompts, every five
iterations. Training never sees it.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.processes.environment import set_up_process

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    set_up_process()

import argparse
import json
import math
import multiprocessing
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import stages.ppo
import stages.rm
import stages.sft  # noqa: F401  (the stages that the commands run)
from rlhf_cli.algorithms.statistics import student_quantile
from rlhf_cli.cli import main as main_of_rlhf

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2, 3, 4, 5)
MEMBERS = 4
LOST = 0.25
"""Gold has turned when it is this far below its best so far."""
KLS = (1, 2, 4, 6, 8)
"""Where gold is compared at equal KL, nats per reply."""
BASE = "one reward model"
"""The method that the others are paired with."""


# ------------------------------------------------------------------------------------------ methods


@dataclass(frozen=True)
class Method:
    """One row of the report: which reward models are trained, what PPO is rewarded by, and PPO's other settings."""

    rewards: Callable[[Path, int], list[dict[str, Any]]]
    """From the working folder and the seed."""
    rm: str = "rm"
    """The reward model that it needs, of RMS, besides `rm`."""
    settings: tuple[str, ...] = ()


RMS: dict[str, tuple[str, ...]] = {
    "rm": (f"members={MEMBERS}",),
    "rm-unflipped": ("data.train={task}/data/unflipped.jsonl",),
    "rm-smoothing": ("label_smoothing=0.25",),
    "rm-flip-rate": ("flip_rate=0.25",),
    "rm-length": ("length_correction=true",),
}
"""Reward models of one seed: name -> settings that differ from the task's rm.yaml. The members of `rm` beside the first
read the rows in other orders; its first is the reward model alone."""
MERGED = "rm-merged"
"""The mean of the weights of the members of `rm` (`rlhf merge`)."""


def one(rm: str) -> Callable[[Path, int], list[dict[str, Any]]]:
    """PPO is rewarded by one reward model."""
    return lambda work, seed: [model(path(work, seed, rm))]


def model(path: str, **keys: Any) -> dict[str, Any]:
    """A reward model as a source of rewards."""
    return {"type": "reward_model", "path": path, **keys}


def shaped(kind: str) -> Callable[[Path, int], list[dict[str, Any]]]:
    """PPO is rewarded by how the reward model's score compares with those of the SFT model's replies."""
    return lambda work, seed: [model(path(work, seed, "rm"), shaping={"kind": kind})]


def limited(work: Path, seed: int) -> list[dict[str, Any]]:
    """PPO is rewarded by a reward model, with replies of at most 20 words on average; the raters like long ones."""
    return [model(path(work, seed, "rm")), {"type": "length", "unit": "words", "max": 0, "limit": {"above": -20}}]


def path(work: Path, seed: int, rm: str) -> str:
    """The directory of a trained reward model."""
    return str(work / f"seed{seed}" / rm / "rm")


def folder(work: Path, seed: int, method: str) -> Path:
    """The folder of a method's PPO run."""
    if method in ROUNDS:
        return folder(work, seed, BASE) / "rounds" / str(ROUNDS[method])
    return work / f"seed{seed}" / re.sub(r"[^\w.]+", "-", method)


def same_sft(work: Path, seed: int) -> list[str]:
    """Four reward models from one SFT model: other orders of the rows."""
    first = path(work, seed, "rm")
    return [first, *(f"{first}/members/{k}" for k in range(1, MEMBERS))]


def other_sft(work: Path, seed: int) -> list[str]:
    """Four reward models, each from the SFT model of its own seed."""
    return [path(work, (seed + k) % len(SEEDS), "rm") for k in range(MEMBERS)]


def ensemble(members: Callable[[Path, int], list[str]], **keys: Any) -> Callable[[Path, int], list[dict[str, Any]]]:
    """PPO is rewarded by an ensemble."""
    return lambda work, seed: [{"type": "ensemble", "members": members(work, seed), **keys}]


METHODS: dict[str, Method] = {
    BASE: Method(one("rm")),
    "no KL penalty": Method(one("rm"), settings=("ppo.kl_coef=0",)),
    "KL penalty 0.1": Method(one("rm"), settings=("ppo.kl_coef=0.1",)),
    "4 from other SFT seeds, mean": Method(ensemble(other_sft, beta="mean")),
    "4 from other SFT seeds, beta 0.02": Method(ensemble(other_sft)),
    "4 from one SFT model, mean": Method(ensemble(same_sft, beta="mean")),
    "4 from one SFT model, beta 0.02": Method(ensemble(same_sft)),
    "4 from one SFT model, merged": Method(lambda work, seed: [model(str(work / f"seed{seed}" / MERGED))]),
    "KL held at 2 nats": Method(
        one("rm"), settings=("ppo.kl_controller=adaptive", "ppo.kl_target=2", "ppo.kl_horizon=1000")
    ),
    "labels without flips": Method(one("rm-unflipped"), "rm-unflipped"),
    "label smoothing 0.25": Method(one("rm-smoothing"), "rm-smoothing"),
    "flip rate 0.25": Method(one("rm-flip-rate"), "rm-flip-rate"),
    "shaping, par": Method(shaped("par")),
    "shaping, log sigmoid": Method(shaped("log_sigmoid")),
    "limit, 20 words": Method(limited),
    "length correction": Method(one("rm-length"), "rm-length"),
}
"""In the order in which they are trained: all methods of a seed, then the next seed."""
ROUNDS = {f"round {number}, labels by gold": number for number in (2, 3)}
"""Rounds of `rlhf pipeline --rounds`, with 500 pairs each that gold labels. Round 1 is the first method, whose
folder goes on."""


# ------------------------------------------------------------------------------------------ training


def rlhf(work: Path, log: Path, *arguments: str) -> None:
    """Run one command of rlhf on one thread, its output in `log`; raises SystemExit with its last lines if it fails.

    It runs in a fork of this process, which has imported what the stages need: a start costs nothing.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work, log, arguments))
    process.start()
    process.join()
    if process.exitcode:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
        raise SystemExit(f"{tail}\n{log}: exit code {process.exitcode}")


def _run(work: Path, log: Path, arguments: Sequence[str]) -> None:
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    start, sys.argv, code = time.monotonic(), ["rlhf", *arguments], 1
    try:
        main_of_rlhf()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    wall, of = time.monotonic() - start, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, of))
    row = {"command": " ".join(arguments[:2]), "processor": round(used, 1), "wall": round(wall, 1)}
    with (work / "seconds.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    os._exit(code)  # what runs at the end of a process belongs to the parent


def stage(work: Path, name: str, out: Path, seed: int, settings: Iterable[str]) -> None:
    """Train one stage into `out`; a finished one is kept."""
    if (out / name / "manifest.json").is_file():
        return
    sets = [f"artifacts={out}", f"seed={seed}", *settings]
    rlhf(work, out / f"{name}.log", name, str(work / "task" / f"{name}.yaml"), *(w for s in sets for w in ("--set", s)))
    print(f"{name} {out.relative_to(work)}", flush=True)


def link(run: Path, **stages: Path) -> None:
    """Put stages of other runs into a run, so that commands find all of its stages."""
    run.mkdir(parents=True, exist_ok=True)
    for name, target in stages.items():
        if not (run / name).exists():
            (run / name).symlink_to(target)


def in_parallel(jobs: Sequence[Callable[[], None]], workers: int) -> None:
    """Run the jobs, a few at a time; the first failure ends them."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def train(work: Path, names: Sequence[str], seeds: Sequence[int], workers: int) -> None:
    """Train what the methods need: every SFT model, then every reward model, then every policy."""
    if not (work / "task").exists():
        rlhf(work, work / "init.log", "init", str(work / "task"), "--from", "support-hard")
        write_unflipped(work / "task" / "data")
    # An ensemble takes the reward models of other seeds, too.
    in_parallel([lambda s=s: stage(work, "sft", work / f"seed{s}", s, ()) for s in SEEDS], workers)

    def train_rm(seed: int, rm: str) -> None:
        out = work / f"seed{seed}" / rm
        link(out, sft=work / f"seed{seed}" / "sft")
        stage(work, "rm", out, seed, [text.format(task=work / "task") for text in RMS[rm]])

    def merge(seed: int) -> None:
        out = work / f"seed{seed}" / MERGED
        if not out.exists():
            rlhf(work, out.parent / f"{MERGED}.log", "merge", *same_sft(work, seed), "--out", str(out))

    def train_ppo(seed: int, name: str) -> None:
        method, out = METHODS[name], folder(work, seed, name)
        link(out, sft=work / f"seed{seed}" / "sft")
        if name == BASE:  # the first round, whose settings are the pipeline's
            stage(work, "rm", out, seed, ())
        link(out, rm=work / f"seed{seed}" / method.rm / "rm")
        rewards = [] if name == BASE else [f"rewards={json.dumps(method.rewards(work, seed))}"]
        stage(work, "ppo", out, seed, [*rewards, *method.settings])

    def train_rounds(seed: int) -> None:
        out, judge = folder(work, seed, BASE), f"{work}/task/judge.py:score"
        if not (out / "rounds" / str(max(ROUNDS.values())) / "ppo" / "manifest.json").is_file():
            arguments = ["--rounds", str(max(ROUNDS.values())), "--labels", judge, "--threads", "1"]
            arguments += ["--set", f"artifacts={out}", "--set", f"seed={seed}"]
            rlhf(work, out / "rounds.log", "pipeline", str(work / "task"), *arguments)

    alone = [name for name in names if name in METHODS]
    rms = sorted({(s, "rm") for s in SEEDS} | {(s, METHODS[name].rm) for s in seeds for name in alone})
    in_parallel([lambda s=s, rm=rm: train_rm(s, rm) for s, rm in rms], workers)
    in_parallel([lambda s=s: merge(s) for s in seeds], workers)
    in_parallel([lambda s=s, name=name: train_ppo(s, name) for s in seeds for name in alone], workers)
    if len(alone) < len(names):
        in_parallel([lambda s=s: train_rounds(s) for s in seeds], workers)


def write_unflipped(data: Path) -> None:
    """The pairs of the task with each flipped label put right: what could be had from these raters without mistakes."""
    with (data / "unflipped.jsonl").open("w", encoding="utf-8") as file:
        for line in (data / "preferences.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["flipped"]:
                row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
            file.write(json.dumps(row) + "\n")


# ------------------------------------------------------------------------------------------ figures


@dataclass(frozen=True)
class Run:
    """The held-out figures of one PPO run, and what warned of it."""

    points: list[dict[str, float]]
    """One for each evaluation, with `step`, `gold`, `score_mean`, `kl`, `flattery`, `unique`."""
    warnings: dict[str, int]
    """Health finding -> the first iteration with it."""
    metrics: list[dict[str, float]]
    """The metrics of each iteration."""
    diagnosed: bool
    """`rlhf diagnose` says that the policy exploits errors of the reward model."""

    @property
    def best(self) -> dict[str, float]:
        """The evaluation with the highest gold."""
        return max(self.points, key=lambda point: point["gold"])

    @property
    def turned(self) -> float | None:
        """The iteration of the first evaluation at which gold is LOST below its best so far; None if it never is."""
        best = self.points[0]["gold"]
        for point in self.points:
            best = max(best, point["gold"])
            if point["gold"] <= best - LOST:
                return point["step"]
        return None

    def gold_at(self, kl: float) -> float | None:
        """Gold where the KL first passes `kl`, between two evaluations in a straight line; None if it never does."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if before["kl"] < kl <= after["kl"]:
                share = (kl - before["kl"]) / (after["kl"] - before["kl"])
                return before["gold"] + share * (after["gold"] - before["gold"])
        return None


def read_run(folder: Path) -> Run:
    """Read a finished PPO run."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "ppo" / name).read_text(encoding="utf-8").splitlines()]

    warnings: dict[str, int] = {}
    for row in rows("health.jsonl"):
        for finding in row["findings"]:
            warnings.setdefault(finding["name"], row["step"])
    if not (folder / "diagnosis.json").is_file():
        command = [sys.executable, "-m", "rlhf_cli", "diagnose", str(folder), "--json", "--files-only"]
        done = subprocess.run(command, capture_output=True, text=True)
        (folder / "diagnosis.json").write_text(done.stdout, encoding="utf-8")
    causes = json.loads((folder / "diagnosis.json").read_text(encoding="utf-8"))["causes"]
    diagnosed = any(cause["name"] == "policy_overoptimised" for cause in causes)
    return Run(rows("evaluations.jsonl"), warnings, rows("metrics.jsonl"), diagnosed)


def interval(values: Sequence[float]) -> str:
    """The mean with the half width of Student's 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    half = student_quantile(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.2f} ± {half:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


# ------------------------------------------------------------------------------------------ early warning


@dataclass(frozen=True)
class Detector:
    """A metric that may warn: it fires when it stays beyond a threshold for three iterations."""

    metric: str
    sign: int
    """1 if the metric rises, -1 if it falls."""
    relative: bool
    """The metric is divided by its mean over the first five iterations."""

    def series(self, run: Run) -> list[float]:
        """What the threshold is compared with, larger for worse; the three last iterations' best value."""
        values = [row[self.metric] for row in run.metrics]
        start = statistics.fmean(values[:5]) if self.relative else 1.0
        signed = [self.sign * value / start for value in values]
        return [min(signed[max(0, i - 2) : i + 1]) for i in range(len(signed))]

    def fires(self, run: Run, threshold: float) -> int | None:
        """The first iteration beyond the threshold; the first five cannot fire."""
        return next((i + 1 for i, value in enumerate(self.series(run)) if i >= 5 and value > threshold), None)


DETECTORS = {
    "entropy, share of the start": Detector("policy/entropy", -1, True),
    "distinct pairs of words, share of the start": Detector("response/distinct_2", -1, True),
    "length, ratio to the start": Detector("response/length", 1, True),
    "KL, nats": Detector("objective/kl", 1, False),
    "unfamiliarity": Detector("response/unfamiliarity", 1, False),
    "standard deviation of the score, share of the start": Detector("objective/score_std", -1, True),
}


@dataclass(frozen=True)
class Warned:
    """How an alarm did over runs: how often it came in time, late or never, and how often without a reason."""

    in_time: list[float]
    """Lead time in iterations of each alarm that came before gold had turned."""
    late: int
    """Runs whose gold had turned when the alarm came."""
    missed: int
    """Runs whose gold turned without an alarm."""
    false: int
    """Runs whose gold did not turn, with an alarm."""
    quiet: int
    """Runs whose gold did not turn, without an alarm."""

    @property
    def merit(self) -> float:
        """The share that was warned in time minus the share of false alarms (Youden's index)."""
        return len(self.in_time) / max(self.turned, 1) - self.false / max(self.held, 1)

    @property
    def turned(self) -> int:
        """Runs whose gold turned."""
        return len(self.in_time) + self.late + self.missed

    @property
    def held(self) -> int:
        """Runs whose gold did not turn."""
        return self.false + self.quiet

    @property
    def cells(self) -> list[str]:
        """For a table: warned in time, median lead, warned late, false alarms."""
        lead = f"{statistics.median(self.in_time):.0f}" if self.in_time else "-"
        return [f"{len(self.in_time)} of {self.turned}", lead, f"{self.late}", f"{self.false} of {self.held}"]


def judge_alarm(runs: Sequence[Run], fires: Callable[[Run], int | None]) -> Warned:
    """Compare when an alarm fired with when gold turned."""
    in_time, late, missed, false, quiet = [], 0, 0, 0, 0
    for run in runs:
        fired = fires(run)
        if run.turned is None:
            false, quiet = false + (fired is not None), quiet + (fired is None)
        elif fired is None:
            missed += 1
        elif fired < run.turned:
            in_time.append(run.turned - fired)
        else:
            late += 1
    return Warned(in_time, late, missed, false, quiet)


def best_threshold(runs: Sequence[Run], detector: Detector) -> float:
    """The threshold with the highest merit on these runs, of values that occur; infinity if none beats silence."""
    values = sorted({value for run in runs for value in detector.series(run)[5:]})
    tried = values[:: max(1, len(values) // 200)]
    return max([math.inf, *tried], key=lambda t: judge_alarm(runs, lambda run: detector.fires(run, t)).merit)


# ------------------------------------------------------------------------------------------ report


def accuracies(work: Path) -> list[list[str]]:
    """Held-out accuracy of the reward models, over the seeds that have them."""
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        for rm in RMS:
            manifest = Path(path(work, seed, rm)) / "manifest.json"
            if manifest.is_file():
                metrics = json.loads(manifest.read_text(encoding="utf-8"))["metrics"]
                found.setdefault(rm, []).append(metrics["eval/accuracy"])
                members = [value for key, value in metrics.items() if re.fullmatch(r"members/accuracy_\d+", key)]
                if members:
                    found.setdefault("a member of four from one SFT model", []).append(statistics.fmean(members))
                    found.setdefault("the mean of their scores", []).append(metrics["members/accuracy_mean"])
        log = work / f"seed{seed}" / f"{MERGED}.log"
        if log.is_file() and (merged := re.search(r"held-out accuracy ([\d.]+)", log.read_text(encoding="utf-8"))):
            found.setdefault("the mean of their weights", []).append(float(merged[1]))
    return [[name, interval(values), str(len(values))] for name, values in found.items()]


def report(runs: dict[str, dict[int, Run]], rms: list[list[str]], command: str) -> str:
    """The text of REWARDS.md."""
    base = runs[BASE]
    seeds = sorted(base)

    def mean(name: str, figure: Callable[[Run], float | None]) -> str:
        values = [figure(run) for run in runs[name].values()]
        return interval([value for value in values if value is not None])

    outcome, equal = [], []
    for name, of in runs.items():
        shared = [seed for seed in of if seed in base]
        paired = [of[s].points[-1]["gold"] - base[s].points[-1]["gold"] for s in shared]
        turned = [run.turned for run in of.values()]
        named = sum(run.diagnosed for run in of.values())
        outcome.append(
            [
                name,
                mean(name, lambda run: run.best["gold"]),
                mean(name, lambda run: run.points[-1]["gold"]),
                "" if name == BASE else interval(paired),
                mean(name, lambda run: run.best["gold"] - run.points[-1]["gold"]),
                mean(name, lambda run: run.points[-1]["score_mean"]),
                mean(name, lambda run: run.points[-1]["kl"]),
                f"{100 * statistics.fmean(run.points[-1]['flattery'] for run in of.values()):.0f} %",
                f"{sum(t is not None for t in turned)} of {len(of)}",
                f"{statistics.median([t for t in turned if t is not None]):.0f}" if any(turned) else "-",
                f"{named}",
                f"{len(of)}",
            ]
        )
        cells = [name]
        for kl in KLS:
            at = {s: run.gold_at(kl) for s, run in of.items()}
            both = [(at[s], base[s].gold_at(kl)) for s in shared]
            gaps = [mine - theirs for mine, theirs in both if mine is not None and theirs is not None]
            reached = [value for value in at.values() if value is not None]
            gap = f" ({interval(gaps)})" if name != BASE and gaps else ""
            cells.append(f"{statistics.fmean(reached):.2f}{gap}, {len(reached)}" if reached else "-")
        equal.append(cells)

    every = [run for of in runs.values() for run in of.values()]
    first = [run for of in runs.values() for seed, run in of.items() if seed in seeds[: len(seeds) // 2]]
    second = [run for of in runs.values() for seed, run in of.items() if seed in seeds[len(seeds) // 2 :]]
    rules = sorted({name for run in every for name in run.warnings})
    said = [[f"`{rule}`", *judge_alarm(every, lambda run, rule=rule: run.warnings.get(rule)).cells] for rule in rules]
    found = []
    for name, detector in DETECTORS.items():
        threshold = best_threshold(first, detector)
        fires = partial(detector.fires, threshold=threshold)
        alarms = [judge_alarm(half, fires).cells for half in (first, second)]
        found.append([name, "none" if math.isinf(threshold) else f"{abs(threshold):.2f}", *alarms[0], *alarms[1]])
    sft = statistics.fmean(run.points[0]["gold"] for run in base.values())
    alarm = ["in time", "lead", "late", "false"]
    columns = ["method", "best gold", "gold at the end", "minus the first row", "lost since the best", "score", "KL"]
    return "\n\n".join(
        [
            "# Over-optimisation and what helps",
            f"Written by `{command}`. {len(every)} PPO runs of 64 iterations, on up to {len(seeds)} seeds; the same "
            f"command trains what is missing of {len(SEEDS)}. Gold of the SFT model: {sft:.2f}. Intervals: 95 %, "
            "Student's, over seeds. Differences are paired by seed.",
            f"## Outcome\n\nGold has turned when it is {LOST} below its best so far.",
            table([*columns, "flattery", "turned", "at iteration", "diagnosed", "runs"], outcome),
            "## Gold at equal KL\n\nGold where a run first passes this KL, in parentheses the difference from the "
            "first row over the seeds where both do; then the number of seeds that reach it.",
            table(["method", *(f"{kl} nats" for kl in KLS)], equal),
            "## Reward models\n\nHeld-out accuracy; 0.975 is possible.",
            table(["reward model", "accuracy", "seeds"], rms),
            "## What health said\n\nOver all runs: the first line of each rule against the evaluation at which gold "
            "had turned. The lead is the median in iterations; evaluations are five iterations apart.",
            table(["rule", "in time", "lead", "late", "false alarms"], said),
            f"## Thresholds\n\nChosen on seeds {', '.join(map(str, seeds[: len(seeds) // 2]))} for the largest share "
            "warned in time minus the share of false alarms, then applied to the other seeds.",
            table(["metric", "threshold", *alarm, *(f"others: {name}" for name in alarm)], found),
        ]
    )


WIDTH, COLUMNS, PANEL, GAP = 1000, 3, 190, 66
MAX_KL, MAX_GOLD = 20.0, 4.0


def draw(runs: dict[str, dict[int, Run]]) -> str:
    """Gold and score against the KL, one panel a method: a thin line for each seed, a thick one for their mean."""
    width = (WIDTH - 30) / COLUMNS
    rows = -(-len(runs) // COLUMNS)
    height = 60 + rows * (PANEL + GAP)
    light = {"card": "#ffffff", "ink": "#1f2328", "quiet": "#59636e", "grid": "#e6eaef"}
    dark = {"card": "#0d1117", "ink": "#f0f6fc", "quiet": "#9198a1", "grid": "#262c36"}

    def style(colours: dict[str, str]) -> str:
        return " ".join(f".{name} {{ fill: {c} }} .{name}-line {{ stroke: {c} }}" for name, c in colours.items())

    light |= {"gold": "#9a6700", "score": "#0969da"}
    dark |= {"gold": "#d29922", "score": "#4493f8"}
    parts = [
        '<text x="30" y="30" class="ink" font-size="15" font-weight="600">Gold and score against the KL</text>',
        '<text x="290" y="30" class="gold" font-size="13" font-weight="600">gold</text>',
        '<text x="335" y="30" class="score" font-size="13" font-weight="600">score</text>',
        '<text x="390" y="30" class="quiet" font-size="13">along PPO; x: nats per reply to the SFT model</text>',
    ]

    def label(x: float, y: float, text: object, more: str = 'font-size="11" class="quiet"') -> str:
        return f'<text x="{x:g}" y="{y:g}" {more}>{escape(str(text))}</text>'

    for number, (name, of) in enumerate(runs.items()):
        left, top = 40 + (number % COLUMNS) * width, 80 + (number // COLUMNS) * (PANEL + GAP)

        def place(kl: float, value: float, left: float = left, top: float = top) -> tuple[float, float]:
            x = left + (width - 40) * min(max(kl, 0.0), MAX_KL) / MAX_KL
            return x, top + PANEL * (1 - min(max(value, 0.0), MAX_GOLD) / MAX_GOLD)

        parts.append(label(left, top - 10, name, 'font-size="13" font-weight="600" class="ink"'))
        for value in range(int(MAX_GOLD) + 1):
            y = place(0, value)[1]
            parts.append(f'<path class="grid-line" d="M{left:g} {y:g}H{place(MAX_KL, value)[0]:g}"/>')
            parts.append(label(left - 14, y + 4, value))
        parts += [label(place(kl, 0)[0] - 4, top + PANEL + 16, kl) for kl in (0, 5, 10, 15, 20)]
        for figure, colour in (("score_mean", "score"), ("gold", "gold")):
            curves = [[(point["kl"], point[figure]) for point in run.points] for run in of.values()]
            average = [tuple(map(statistics.fmean, zip(*at, strict=True))) for at in zip(*curves, strict=True)]
            for curve, stroke in (
                *((c, 'stroke-width="1" stroke-opacity="0.35"') for c in curves),
                (average, 'stroke-width="2.5"'),
            ):
                points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in curve)
                parts.append(f'<polyline class="{colour}-line" fill="none" {stroke} points="{points}"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'role="img" aria-label="Gold and score against the KL, for each method" '
            "font-family=\"-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif\">",
            f"<style>{style(light)} @media (prefers-color-scheme: dark) {{ {style(dark)} }}</style>",
            f'<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Over-optimisation and what helps, on the hard shop-support task.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; given again, it is resumed")
    every = [*METHODS, *ROUNDS]
    parser.add_argument("--methods", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="processes at the same time")
    parser.add_argument("--finished", action="store_true", help="train nothing, and report what is finished")
    parser.add_argument(
        "--record", action="store_true", help="also write benchmarks/REWARDS.md and its picture in docs/"
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    if not arguments.finished:
        train(work, arguments.methods, arguments.seeds, arguments.workers)
    runs: dict[str, dict[int, Run]] = {}
    for name in dict.fromkeys([BASE, *arguments.methods]):
        places = {seed: folder(work, seed, name) for seed in arguments.seeds}
        found = {s: read_run(place) for s, place in places.items() if (place / "ppo" / "manifest.json").is_file()}
        runs |= {name: found} if found else {}
    text = report(runs, accuracies(work), "python benchmarks/rewards.py --work DIR")
    (work / "REWARDS.md").write_text(text + "\n", encoding="utf-8")
    (work / "overoptimization.svg").write_text(draw(runs), encoding="utf-8")
    if arguments.record:
        shutil.copy(work / "REWARDS.md", HERE / "REWARDS.md")
        shutil.copy(work / "overoptimization.svg", HERE.parent / "docs" / "overoptimization.svg")


if __name__ == "__main__":
    main()
