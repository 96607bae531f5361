"""Measure on a GPU what has been measured on CPUs only: memory against the plan, rollouts and speed; run the GPU tests.

    python benchmarks/gpu.py --work DIR [--trl-ppo-python PYTHON]      # up to 30 minutes
    python benchmarks/gpu.py --work DIR --list                         # the parts, in their order
    python benchmarks/gpu.py --work DIR --parts "memory 1.5 B PPO LoRA" "tests test_nf4"
    python benchmarks/gpu.py --work DIR --device cpu --tiny            # check that every line runs

Each part runs in a process of its own, the most important first: gpu_memory.py, gpu_speed.py, and each file of tests
that need a GPU. A part that fails is reported, and the others run. A finished part is not repeated: the same command
once more runs those that failed or for which the time (`--minutes`) was too short.
The models are Llamas of the sizes of Qwen2, with random weights. DIR needs 30 GB.

Writes DIR/results/gpu.json with the machine, the versions and every figure, and prints tables for docs/speed.md.
speed_report.py adds them to RESULTS.md. Without a CUDA device it prints one line and ends with exit code 2.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpu_memory
import gpu_speed
import torch
from gpu_inputs import FULL, MEDIUM, MEDIUM_SIZES, SIZES, TINY, TINY_SIZES, Inputs
from speed_report import code, table

from rlhf_cli.models.quantized import quiet_bitsandbytes
from rlhf_cli.processes.environment import set_up_process

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
EVERY_SIZE = {
    name: (size, plan)
    for sizes, plan in ((SIZES, FULL), (MEDIUM_SIZES, MEDIUM), (TINY_SIZES, TINY))
    for name, size in sizes.items()
}
MOST_S = 240
"""Seconds after which a part is ended."""
TESTS_S = 600
"""Seconds after which a file of tests is ended. Each of its tests may load a model, and compile its passes."""
TESTS = {path.stem: path for path in sorted(ROOT.glob("tests/*/test_*.py")) if "support.gpu" in path.read_text("utf-8")}
"""The files with tests that need a GPU."""
TESTS_HEAD = ["file", "passed", "failed", "skipped", "s"]


def main() -> None:
    """Run the parts that are missing, then write and print all figures."""
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu.py: torch sees no CUDA device, nothing was measured. To check the script: --device cpu --tiny",
            file=sys.stderr,
        )
        raise SystemExit(2)
    if args.part is not None:
        write_json(args.part_file, run_part(args))
        return
    names = parts_of(list(TINY_SIZES if args.tiny else SIZES))
    chosen = args.parts or names
    unknown = [name for name in chosen if name not in names]
    if args.list or unknown:
        print(*[f"no part {name!r}" for name in unknown], *names, sep="\n")
        raise SystemExit(2 if unknown else 0)
    began = time.monotonic()
    for name in chosen:
        left = 60 * args.minutes - (time.monotonic() - began)
        print(f"{name}: {advance(name, args, left)}", flush=True)
    found = collect(names, args)
    write_json(args.work / "results" / "gpu.json", found)
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes; {args.work / 'results' / 'gpu.json'}\n")
    print("\n".join(report(found)))
    if any(found["parts"][name]["status"] != "done" for name in chosen):
        raise SystemExit(1)


def parts_of(sizes: list[str]) -> list[str]:
    """The names of all parts, the most important first."""
    first, *others = sizes
    speed = [f"speed {first} {what}" for what in ("SFT", "RM", "PPO")]
    return [
        *(f"memory {first} PPO {kind}" for kind in ("LoRA", "NF4")),
        f"speed {first} rollouts",
        *(f"tests {name}" for name in TESTS),
        f"memory {first} PPO full",
        *(f"memory {first} {stage} {kind}" for kind in ("LoRA", "full") for stage in ("SFT", "RM")),
        *speed,
        *(f"speed {size} {what}" for size in others for what in ("rollouts", "SFT", "RM", "PPO")),
    ]


# --------------------------------------------------------------------------------- a part in its own process


def advance(name: str, args: argparse.Namespace, left: float) -> str:
    """Run a part unless it is finished; returns what became of it."""
    file = file_of(name, args)
    if finished(file, args) is not None:
        return "finished before"
    if left < 20:
        return "not started, the time is over. Run the same command again"
    file.parent.mkdir(parents=True, exist_ok=True)
    log = file.with_suffix(".log")
    command = [sys.executable, __file__, "--work", str(args.work), "--device", args.device, "--part", name]
    command += ["--part-file", str(file), *(["--tiny"] if args.tiny else [])]
    command += ["--trl-ppo-python", str(args.trl_ppo_python)] if args.trl_ppo_python else []
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            child.wait(min(TESTS_S if name.startswith("tests ") else MOST_S, left))
        except subprocess.TimeoutExpired:
            output.write(f"ended after {time.monotonic() - began:.0f} s\n")
        finally:
            # Its own children, too: the worker of a stage, and that of TRL.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if finished(file, args) is not None:
        return f"done in {time.monotonic() - began:.0f} s"
    return f"FAILED: {last_line(log)} ({log})"


def run_part(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one part in this process."""
    began, device = time.monotonic(), torch.device(args.device)
    quiet_bitsandbytes()
    if args.part.startswith("tests "):
        result = run_tests(args.part.removeprefix("tests "), args.part_file)
    else:
        room, rest = args.part.split(" ", 1)
        size, plan = next((size, plan) for size, (_, plan) in EVERY_SIZE.items() if rest.startswith(f"{size} "))
        what = rest.removeprefix(f"{size} ")
        inputs = Inputs(folder_of(args) / size.replace(" ", ""), EVERY_SIZE[size][0], plan, device)
        result = measure_memory(inputs, what) if room == "memory" else measure_speed(inputs, what, args.trl_ppo_python)
        for table in ("rows", "pace"):
            result[table] = [[size, *row] for row in result.get(table, [])]
    return result | {"seconds": time.monotonic() - began, "machine": machine(args)}


def measure_memory(inputs: Inputs, what: str) -> dict[str, Any]:
    stage, kind = what.split()
    return gpu_memory.measure(inputs, stage.lower(), kind)


def measure_speed(inputs: Inputs, what: str, trl_python: Path | None) -> dict[str, Any]:
    bench = gpu_speed.Bench(inputs, trl_python)
    return {"rows": getattr(bench, what.lower())(), "flops": bench.flops, "bandwidth": bench.bandwidth}


def run_tests(name: str, part_file: Path) -> dict[str, Any]:
    """Run the tests of a file that are marked `gpu`. Without a GPU they are skipped."""
    report = part_file.with_suffix(".xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        str(TESTS[name]),
    ]
    code = subprocess.run(command, cwd=ROOT).returncode
    suite = ElementTree.parse(report).getroot()[0]
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    failed += [case.get("name") for case in suite.iter("testcase") if case.find("error") is not None]
    count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    seconds = float(suite.get("time", 0))
    row = [name, *map(str, (count - skipped - len(failed), len(failed), skipped)), f"{seconds:.0f}"]
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with exit code {code}")
    return {"rows": [row], "failed": failed, "seconds_of_tests": seconds}


# ----------------------------------------------------------------------------------------------- the figures


def finished(file: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """The result of a part, if it was measured on this device. One whose tests failed is run again."""
    if not file.is_file():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result if result["machine"]["device"] == device_name(args) and not result.get("failed") else None


def collect(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """All figures of the finished parts."""
    parts: dict[str, dict[str, Any]] = {}
    for name in names:
        file, result = file_of(name, args), finished(file_of(name, args), args)
        log = file.with_suffix(".log")
        if result is not None:
            parts[name] = {"status": "done", **result}
        elif file.is_file():
            parts[name] = {"status": "failed", **json.loads(file.read_text(encoding="utf-8"))}
        else:
            parts[name] = {"status": f"failed: {last_line(log)}" if log.is_file() else "not run", "rows": []}
    speed = next((part for part in parts.values() if "flops" in part), {})

    def rows(room: str) -> list[list[str]]:
        return [row for name, part in parts.items() if name.startswith(room) for row in part["rows"]]

    pace = [row for part in parts.values() for row in part.get("pace", [])]

    return machine(args) | {
        "flops": speed.get("flops", 0.0),
        "bandwidth": speed.get("bandwidth", 0.0),
        "minutes": sum(part.get("seconds", 0.0) for part in parts.values()) / 60,
        "head": gpu_speed.HEAD,
        "rows": rows("speed") + pace,
        "memory": {"head": gpu_memory.HEAD, "rows": rows("memory")},
        "tests": {"head": TESTS_HEAD, "rows": rows("tests")},
        "parts": parts,
    }


def report(found: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [f"{found['device']}, {found['date']}, commit {found['code']}: `benchmarks/gpu.py`. {versions}."]
    if found["flops"]:
        lines[0] += f" {found['flops'] / 1e12:.3g} TFLOPS, {found['bandwidth'] / 1e9:.4g} GB/s."
    lines.append("")
    for one in (found["memory"], found, found["tests"]):
        lines += table(one["head"], one["rows"]) if one["rows"] else []
    missing = [f"- {name}: {part['status']}" for name, part in found["parts"].items() if part["status"] != "done"]
    return [*lines, *(["Not measured:", "", *missing] if missing else [])]


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and the versions of a measurement."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts: dict[str, Any] = {
        "device": device_name(args),
        "date": datetime.date.today().isoformat(),
        "code": code(),
        "cores": os.cpu_count(),
        "versions": versions,
    }
    if args.device == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
        facts["gpu_memory"] = torch.cuda.get_device_properties(0).total_memory
        facts["gpus"] = torch.cuda.device_count()
    return facts


def device_name(args: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if args.device == "cuda" else "cpu"


def folder_of(args: argparse.Namespace) -> Path:
    return Path(args.work) / ("gpu-tiny" if args.tiny else "gpu")


def file_of(name: str, args: argparse.Namespace) -> Path:
    return folder_of(args) / "parts" / f"{name.replace(' ', '-')}.json"


def last_line(log: Path) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def write_json(path: Path, value: Any) -> None:
    """Write a file that is complete if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), required=True, help="models and results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, to check that every line runs")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--minutes", type=float, default=30, help="no part runs longer than this after the start")
    parser.add_argument("--trl-ppo-python", type=Path, help="Python of an environment with TRL 1.12.0")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--part-file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    set_up_process()
    main()
