"""Write RESULTS.md of the speed benchmark from the files of speed.py, growth.py and gpu.py under DIR/results."""

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from speed_inputs import LENGTHS, MAX_NEW_TOKENS, MODELS, TEMPERATURE, Size
from speed_limits import Work, rm_work, rollout_work, scoring_work, sft_work, update_work

MEMORY_FLOOR, MEMORY_GOAL = 0.7, 0.5
HELP_FLOOR, HELP_GOAL = 0.3, 0.15
START_GOAL = 1.5
SLACK = 0.2
"""How far a measured exponent may be above that of the work."""
Result = dict[str, Any]


def machine() -> dict[str, Any]:
    """The machine and the versions of the measurement."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "load": os.getloadavg()[1],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "date": datetime.date.today().isoformat(),
    }


def code() -> str:
    """The commit that is measured."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


# ------------------------------------------------------------------------------------------- figures


def timed(result: Result, side: str) -> list[dict[str, Any]]:
    """The steps after the warm-up."""
    return result[side][result["warmup"] :]


def ratios(result: Result, clock: str) -> list[float]:
    """Ours divided by TRL's, pair by pair, in units of work per second."""
    return [
        (ours["units"] / ours[clock]) / (trl["units"] / trl[clock])
        for ours, trl in zip(timed(result, "ours"), timed(result, "trl"), strict=True)
    ]


def rate(result: Result, side: str) -> float:
    """Units of work per second, over all timed steps."""
    steps = timed(result, side)
    return sum(step["units"] for step in steps) / sum(step["wall_s"] for step in steps)


def spread(values: Sequence[float]) -> str:
    """The median, with the quartiles in brackets.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    '3.00 (2.00-4.00)'
    """
    if len(values) < 3:
        return f"{statistics.median(values):.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def work_of(result: Result, step: dict[str, Any]) -> dict[str, Work]:
    """The minimum work of one of our steps, by phase."""
    size, kind = MODELS[result["task"]["model"]], result["task"]["kind"]
    if kind == "sft":
        return {"training step": sft_work(size, step["work"])}
    if kind == "rm":
        return {"training step": rm_work(size, step["work"])}
    lengths = step["prompt_lengths"], step["response_lengths"]
    found = {"rollout": rollout_work(size, *lengths)}
    if kind == "ppo":
        found["scoring"] = scoring_work(size, *lengths)
        found["update"] = update_work(size, *lengths, result["task"]["epochs"])
    return found


def measured_phases(result: Result) -> dict[str, list[float]]:
    """Our seconds of each phase and step; for PPO from its metrics."""
    if result["task"]["kind"] != "ppo":
        name = "rollout" if result["task"]["kind"] == "rollout" else "training step"
        return {name: [step["wall_s"] for step in timed(result, "ours")]}
    rows = [step["metrics"] for step in timed(result, "ours")]
    return {
        "rollout": [row["time/rollout_s"] for row in rows],
        "scoring": [row["time/scoring_s"] + row["time/reward_s"] for row in rows],
        "update": [row["time/update_s"] for row in rows],
    }


def shares_of_limit(result: Result, limits: dict[str, float]) -> list[tuple[str, float, dict[str, float]]]:
    """(phase, our median seconds, seconds at each limit); the whole step is last."""
    steps = timed(result, "ours")
    phases, found = measured_phases(result), []
    for name, seconds in phases.items():
        least = [work_of(result, step)[name].seconds(limits) for step in steps]
        found.append((name, statistics.median(seconds), {k: statistics.median(x[k] for x in least) for k in least[0]}))
    if len(found) > 1:
        # The phases run one after the other; each is bounded by the longest of its three.
        bound = {"arithmetic": sum(max(least.values()) for _, _, least in found)}
        found.append(("whole iteration", statistics.median(step["wall_s"] for step in steps), bound))
    return found


# --------------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """
    >>> table(["a", "b"], [["1", "2"]])
    ['| a | b |', '|---|---|', '| 1 | 2 |', '']
    """
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def line(result: Result) -> str:
    """One result as a line for the screen."""
    checks = ", ".join(f"{name} {gap:.1e}" for name, gap in result["checks"].items())
    return (
        f"  ours {rate(result, 'ours'):,.4g}, TRL {rate(result, 'trl'):,.4g} {result['task']['unit']}; ratio wall "
        f"{spread(ratios(result, 'wall_s'))}, processor {spread(ratios(result, 'cpu_s'))}; {checks or 'no check'}"
    )


def verdict(value: float, floor: float | None, goal: float | None, *, lower: bool = False) -> str:
    """Compare a figure with its floor and its goal.

    >>> verdict(3.2, 2.2, 3.0), verdict(2.5, 2.2, 3.0), verdict(1.0, 2.2, 3.0), verdict(0.6, 0.7, 0.5, lower=True)
    ('goal reached', 'floor held', 'BELOW THE FLOOR', 'floor held')
    """
    sign = -1 if lower else 1
    if goal is not None and sign * value >= sign * goal:
        return "goal reached"
    if floor is None:
        return "" if goal is None else "goal not reached"
    return "floor held" if sign * value >= sign * floor else "BELOW THE FLOOR"


def number(value: float | None, form: str = "{:g}x") -> str:
    return "" if value is None else form.format(value)


def ratio_table(results: Sequence[Result]) -> list[str]:
    rows = []
    for r in results:
        wall = ratios(r, "wall_s")
        rows.append(
            [
                r["task"]["name"],
                r["precision"],
                str(r["threads"]),
                r["task"]["unit"],
                f"{rate(r, 'trl'):,.4g}",
                f"{rate(r, 'ours'):,.4g}",
                f"**{spread(wall)}**",
                spread(ratios(r, "cpu_s")),
                number(r["task"]["floor"]),
                number(r["task"]["goal"]),
                verdict(statistics.median(wall), r["task"]["floor"], r["task"]["goal"]),
                str(len(wall)),
            ]
        )
    head = ["work", "both in", "threads", "unit", "TRL", "ours", "ratio, wall", "ratio, processor", "floor", "goal", ""]
    head.append("pairs")
    return table(head, rows)


def memory_table(results: Sequence[Result]) -> list[str]:
    rows = []
    for r in results:
        ours, trl = (max(step["peak_rss"] for step in timed(r, side)) / 1e6 for side in ("ours", "trl"))
        has_floor = r["task"]["name"] == "PPO a, 1 epoch"
        floor, goal = (MEMORY_FLOOR, MEMORY_GOAL) if has_floor else (None, None)
        rows.append(
            [
                r["task"]["name"],
                str(r["threads"]),
                f"{trl:,.0f}",
                f"{ours:,.0f}",
                f"{ours / trl:.2f}",
                number(floor),
                number(goal),
                verdict(ours / trl, floor, goal, lower=True),
            ]
        )
    return table(["work", "threads", "TRL, MB", "ours, MB", "ours / TRL", "floor", "goal", ""], rows)


def startup_table(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    wall, cpu = ({name: statistics.median(x[i] for x in taken) for name, taken in found.items()} for i in (0, 1))
    ours, first, imports = "rlhf --help", "rlhf sft, first step", "imports"
    ratio = wall[first] / wall[imports]
    said = {
        ours: f"floor {HELP_FLOOR} s, goal {HELP_GOAL} s: {verdict(wall[ours], HELP_FLOOR, HELP_GOAL, lower=True)}",
        imports: "`import torch, transformers` and two auto classes",
        first: f"model a; {ratio:.2f}x the imports (processor {cpu[first] / cpu[imports]:.2f}x), goal {START_GOAL}x: "
        + verdict(ratio, None, START_GOAL, lower=True),
    }
    rows = [[f"`{n}`" if "help" in n else n, f"{wall[n]:.2f}", f"{cpu[n]:.2f}", said.get(n, "")] for n in found]
    return table(["whole process, medians", "wall, s", "processor, s", ""], rows)


def percentiles(values: Sequence[float]) -> str:
    """The 10th, 50th and 90th percentile.

    >>> percentiles(list(range(101)))
    '10 / 50 / 90'
    """
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return f"{cuts[0]:.0f} / {cuts[4]:.0f} / {cuts[8]:.0f}"


def length_table(results: Sequence[Result]) -> list[str]:
    rows = []
    for r in results:
        name, threads = r["task"]["name"], str(r["threads"])
        for side in ("ours", "trl"):
            steps = timed(r, side)
            if "prompt_lengths" in steps[0]:
                prompts = [n for step in steps for n in step["prompt_lengths"]]
                responses = [n for step in steps for n in step["response_lengths"]]
                both = [a + b for a, b in zip(prompts, responses, strict=True)]
                ended = sum(step["ended"] for step in steps) / len(responses)
                real = f"{sum(both) / len(steps):,.0f}"
                rows.append([name, threads, side, percentiles(both), percentiles(prompts), percentiles(responses)])
                rows[-1] += [f"{statistics.fmean(responses):.1f}", f"{ended:.0%}", real]
            elif r["task"]["kind"] == "sft" and side == "ours":
                lengths = [n for step in steps for n, _ in step["work"]]
                responses = [n for step in steps for _, n in step["work"]]
                prompts = [a - b for a, b in zip(lengths, responses, strict=True)]
                real = f"{sum(lengths) / len(steps):,.0f}"
                rows.append([name, threads, "both", percentiles(lengths), percentiles(prompts), percentiles(responses)])
                rows[-1] += [f"{statistics.fmean(responses):.1f}", "", real]
            elif r["task"]["kind"] == "rm" and side == "ours":
                lengths = [n for step in steps for _, a, b in step["work"] for n in (a, b)]
                prompts = [prefix for step in steps for prefix, _, _ in step["work"]]
                real = f"{sum(lengths) / len(steps):,.0f}"
                rows.append([name, threads, "both", percentiles(lengths), percentiles(prompts), "", "", "", real])
        padded = [step.get("computed") for step in timed(r, "trl")]
        what = "generated " if r["task"]["kind"] == "rollout" else ""
        rows[-1].append(f"{statistics.fmean(padded):,.0f} {what}in TRL" if padded[0] else "")
    for row in rows:
        row += [""] * (10 - len(row))
    head = ["work", "threads", "side", "tokens", "prompt", "response", "mean response", "ended"]
    return table([*head, "real tokens per step", "with padding"], rows)


def check_table(results: Sequence[Result]) -> list[str]:
    rows = []
    for r in results:
        gaps = ", ".join(f"{name} {gap:.1e}" for name, gap in r["checks"].items())
        same = "" if r["packing"] else "the same tokens in every step; "
        said = ""
        if r["task"]["kind"] == "ppo":
            ours, trl = (timed(r, side) for side in ("ours", "trl"))
            kl, trl_kl = (statistics.fmean(step["kl"] for step in side) for side in (ours, trl))
            ratio = statistics.fmean(step["ratio"] for step in trl)
            said = f"; over the run KL {kl:.2g} and in TRL {trl_kl:.2g}, TRL's ratio {ratio:.3f}"
        rows.append([r["task"]["name"], str(r["threads"]), f"{same}{gaps}{said}".rstrip("; ") or "other batches"])
    return table(["work", "threads", "what was compared, and the largest relative difference"], rows)


def limit_table(results: Sequence[Result], limits: dict[int, dict[str, float]]) -> list[str]:
    rows = []
    for r in results:
        if r["packing"] or r["precision"] != "float32" or r["threads"] not in limits:
            continue
        for phase, seconds, least in shares_of_limit(r, limits[r["threads"]]):
            bound = max(least, key=lambda name: least[name])
            parts = [
                f"{1e3 * least[name]:,.1f}" if name in least else "" for name in ("arithmetic", "bytes", "dispatch")
            ]
            if phase == "whole iteration":
                parts, bound = [f"{1e3 * least[bound]:,.1f} in sum", "", ""], ""
            share = f"{max(least.values()) / seconds:.0%}"
            rows.append([r["task"]["name"], str(r["threads"]), phase, f"{1e3 * seconds:,.1f}", *parts, share, bound])
    head = ["work", "threads", "phase", "ours, ms", "arithmetic, ms", "bytes, ms", "dispatch, ms", "of the limit"]
    return table([*head, "bound by"], rows)


def breakdown_table(results: Sequence[Result]) -> list[str]:
    rows = []
    for r in results:
        if r["task"]["kind"] != "ppo":
            continue
        steps = timed(r, "ours")
        whole = statistics.median(step["wall_s"] for step in steps)
        keys = [key for key in steps[0]["metrics"] if key.startswith("time/") and key.endswith("_s")]
        parts = {key.removeprefix("time/"): statistics.median(s["metrics"][key] for s in steps) for key in keys}
        parts["the rest"] = whole - sum(parts.values())
        said = ", ".join(f"{name} {1e3 * value:,.0f} ms ({value / whole:.0%})" for name, value in parts.items())
        rows.append([r["task"]["name"], str(r["threads"]), f"{1e3 * whole:,.0f}", said])
    return table(["work", "threads", "iteration, ms", "from metrics.jsonl, medians"], rows)


# --------------------------------------------------------------------------------------------- report


def load(results: Path) -> tuple[list[Result], dict[str, Any]]:
    """The results in the order of the tasks, and the other files by name."""
    found, others = [], {}
    for path in results.glob("*.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if "task" in value:
            found.append(value)
        else:
            others[path.stem] = value
    order = {name: i for i, name in enumerate(["sft", "rm", "ppo", "rollout"])}
    found.sort(
        key=lambda r: (order[r["task"]["kind"]], r["task"]["model"], r["packing"], r["task"]["epochs"], r["threads"])
    )
    return found, others


def write(results: Path, out: Path) -> None:
    """Write the report; parts that were not measured say so."""
    found, others = load(results)
    limits = {int(name.split("-")[1]): value for name, value in others.items() if name.startswith("limits-")}
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("Against TRL", lambda: [RATIO_TEXT, "", *ratio_table(found)]),
        ("Do both compute the same", lambda: [CHECK_TEXT, "", *check_table(found)]),
        ("Memory", lambda: [MEMORY_TEXT, "", *memory_table(found)]),
        ("Start-up", lambda: startup_table(others["startup"])),
        ("Lengths", lambda: [LENGTH_TEXT, "", *length_table(found)]),
        ("Where a PPO iteration goes", lambda: breakdown_table(found)),
        ("How far from the machine's limit", lambda: [limit_text(limits), "", *limit_table(found, limits)]),
        ("Growth", lambda: growth(others["growth"])),
        ("GPU", lambda: gpu(others["gpu"])),
    ]
    lines = [*head(others.get("run"), {r["code"] for r in found}), ""]
    for title, make in parts:
        lines += [f"## {title}", ""]
        try:
            lines += make()
        except (KeyError, IndexError):
            lines += [f"{'See [GPU.md](GPU.md)' if title == 'GPU' else 'Not measured'}.", ""]
    out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def head(run: dict[str, Any] | None, codes: set[str]) -> list[str]:
    lines = ["# Speed: ours against TRL's", "", "Written by `benchmarks/speed.py`; not edited by hand.", ""]
    if run is None:
        return [*lines, "The machine is unknown: speed.py has not run to its end."]
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return [
        *lines,
        f"- date: {run['date']}; command: `{run['command']}` (`make bench` runs all of it), "
        f"{run['minutes']:.0f} minutes",
        f"- machine: {run['cpu']}, {run['cores']} cores, {run['memory_gb']:.0f} GB; load average {run['load']:.1f} "
        "(1.0 is the benchmark itself)",
        f"- both sides: Python {run['python']}, {versions}; SFT and RM against TRL 1.16.0, PPO against 1.12.0",
        f"- our code: {', '.join(sorted(codes)) or 'none was measured'}"
        + (" (NOT ONE RUN: the tables below come from several states of the code)" if len(codes) > 1 else ""),
        *(
            f"- model {name}: Llama, hidden {s.hidden}, intermediate {s.intermediate}, {s.layers} layers, "
            f"{s.heads} heads, vocabulary {s.vocabulary:,}, tied ({parameters(s) / 1e6:.2f} M parameters)"
            for name, s in MODELS.items()
        ),
    ]


def parameters(size: Size) -> int:
    """
    >>> parameters(MODELS["a"])
    1053824
    """
    layer = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return size.layers * layer + size.vocabulary * size.hidden + size.hidden


RATIO_TEXT = """\
Each side is a process on the same cores. They take turns: one training step (SFT, RM: 16 rows or pairs), one PPO
iteration or one batch of rollouts at a time. The ratio is taken pair by pair: median and quartiles. Wall seconds count;
processor seconds are less disturbed by other processes. The first two steps of both (PPO and rollouts: one) are
skipped. Both compute in the precision that `precision: auto` takes for the model on this processor, unless the command
names one; TRL in bfloat16 has `bf16=True`, weights in float32, and its frozen models in bfloat16. TRL runs without
gradient checkpointing, logging, progress bars and checkpoints, and with its fastest microbatch; ours is the stage with
its defaults, metrics, samples and health lines. `TRL packing` is TRL's `packing=True` with 3 rows of 512 tokens per
step, against our usual step of 16 rows. `rollouts` compares HF `generate`, tokens only, with our sampler, which keeps
log-probabilities too; a useful token is one up to the first EOS."""

CHECK_TEXT = """\
Both read the same files. The first loss must agree to 1e-4 (relative), the last to 1e-2, and the digests of every
batch's tokens must be equal. For PPO, TRL's functions on TRL's models score the responses of our first iteration:
log-probabilities (policy and reference), values and reward scores must agree to 1e-4. In bfloat16, which has 8 bits,
all must agree to 3e-2. A failed check stops the benchmark."""

MEMORY_TEXT = """\
The peak resident set of the timed steps (VmHWM, reset after the warm-up), minus the resident set after all imports and
a step of a tiny model, which loads the libraries' own code. It includes weights, optimizer, data and what the allocator
keeps."""

LENGTH_TEXT = (
    "Tokens as 10th / 50th / 90th percentile. Prompts and responses have lognormal lengths: "
    + ", ".join(f"{kind} median {m}, sigma {s}, within [{a}, {b}]" for kind, (m, s, a, b) in LENGTHS.items())
    + f". PPO samples at most {MAX_NEW_TOKENS} tokens at temperature {TEMPERATURE}; the two sides draw differently, so "
    "their lengths differ by chance."
)


def limit_text(limits: dict[int, dict[str, float]]) -> str:
    said = "; ".join(
        f"{threads} thread{'s' if threads > 1 else ''}: {x['flops'] / 1e9:.0f} GFLOPS in float32 products "
        f"(torch.mm {x['mkl_flops'] / 1e9:.0f}, oneDNN {x['onednn_flops'] / 1e9:.0f}), "
        f"{x['bandwidth'] / 1e9:.0f} GB/s, {1e6 * x['dispatch_s']:.1f} us to start an operation"
        for threads, x in sorted(limits.items())
    )
    return f"""Of the work in float32. Measured before and after the tasks, the better of both: {said}.

Arithmetic: the products that the work needs (real tokens, the head where a token is predicted, a shared prompt once,
backward twice forward) at that rate of large products. Bytes: in decoding, all weights once per step and the keys and
values of each live row, at that bandwidth; a model that fits into the caches can be faster. Dispatch: in decoding, 10
operations per layer and 8 per step. Nothing can run faster than the longest of the three. "Of the limit" is its share
of our time. The limit does not include norms, softmax, rotations and the optimizer."""


def growth(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of growth.py."""
    shown = [
        [
            row["phase"],
            row["against"],
            ", ".join(map(str, row["at"])),
            ", ".join(f"{1e3 * s:,.1f}" for s in row["seconds"]),
            f"{row['exponent']:.2f}",
            f"{row['at_the_end']:.2f}",
            f"{row['expected']:.2f}",
            "no faster than the work" if row["at_the_end"] <= row["expected"] + SLACK else "FASTER THAN THE WORK",
        ]
        for row in rows
    ]
    text = (
        "Processor time of one core, the minimum of several tries, other sizes fixed. The exponent is the slope "
        "of the logarithms, over all points and between the last two. That of the work is from its arithmetic, bytes "
        "and calls at the machine's limits between the last two points; attention makes it larger than 1. "
        f"{SLACK} more is allowed: attention's products run below the rate of large ones, and the machine varies."
    )
    return [text, "", *table(["phase", "against", "at", "ms", "exponent", "at the end", "the work's", ""], shown)]


def gpu(found: dict[str, Any]) -> list[str]:
    """The table of gpu.py."""
    if found["device"] == "cpu":
        raise KeyError("a run without a GPU only checks the script")
    lines = [f"{found['device']}, {found['date']}: `benchmarks/gpu.py`.", ""]
    for one in (found, found["memory"], found["tests"]):
        lines += table(one["head"], one["rows"]) if one["rows"] else []
    return lines
