"""Compare our speed with TRL's: same models, data and hyperparameters, with both sides taking turns step by step.

    python benchmarks/speed.py --work DIR                      # everything, about 25 minutes
    python benchmarks/speed.py --work DIR --only ppo --models a --threads 1 --quick
    python benchmarks/speed.py --work DIR --precision float32  # both sides; as a rule what `precision: auto` takes here

Each task starts two processes, ours (speed_ours.py) and TRL's (speed_trl.py, in TRL's own environment), pinned to the
same cores. Each waits at the end of every step until it is told to continue, and they are told in turn. So both are
timed within seconds of each other on a machine whose speed varies. The script first checks that both compute the same,
and stops if they do not.

All measurements are kept under DIR/results, from which speed_report.py writes the report: DIR/RESULTS.md, or with
--record the tracked file beside this script. `--report` only writes the report. Models and data are made once
(speed_inputs.py) and kept in DIR.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import speed_report
from speed_inputs import (
    MAX_LENGTH,
    MAX_NEW_TOKENS,
    ROOT,
    TEMPERATURE,
    Inputs,
    make_inputs,
    ppo_config,
    rm_config,
    sft_config,
    write_config,
)
from speed_limits import best_of, measure_limits

from rlhf_cli.models.passes import FASTER_WEIGHTS, has_amx

HERE = Path(__file__).resolve().parent
OURS = ("GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
TORCH = "torch==2.13.0"
TRL = {"1.12.0": HERE / "trl-constraints.txt", "1.16.0": HERE / "trl-1.16-constraints.txt"}
TOLERANCE = 1e-4
"""Relative, in float32: of first losses, and of log-probabilities, values and scores of equal tokens."""
DRIFT = 1e-2
"""Relative: of losses after some steps, when rounding has had time to grow."""
BFLOAT16_TOLERANCE = 3e-2
"""Relative: of all of these in bfloat16, which has 8 bits (TRL's weights have no more)."""
WARMUP = {"sft": 2, "rm": 2, "ppo": 1, "rollout": 1}
PAIRS = {"sft": 15, "rm": 15, "ppo": 6, "rollout": 9}
QUICK_PAIRS = {"sft": 4, "rm": 4, "ppo": 2, "rollout": 3}
TRL_MICROBATCH = {"a": {"float32": 16, "bfloat16": 16}, "b": {"float32": 4, "bfloat16": 8}}
"""Rows per backward pass in TRL's PPO: the fastest of those tried (README.md)."""


@dataclass(frozen=True)
class Task:
    """A row of the table."""

    name: str
    kind: str
    model: str
    unit: str
    trl: str
    """The release of TRL; for HF generate, the one whose environment is used."""
    floor: float | None = None
    goal: float | None = None
    epochs: int = 1
    packing: bool = False
    batch_size: int = 16
    """Of TRL's SFT and RM. 3 packed rows of 512 hold about as many tokens as 16 rows."""
    options: dict[str, Any] = field(default_factory=dict)


TASKS = [
    Task("SFT a", "sft", "a", "real tokens/s", "1.16.0", 2.2, 3.0),
    Task("SFT b", "sft", "b", "real tokens/s", "1.16.0", 2.2, 3.0),
    Task("SFT a, TRL packing", "sft", "a", "real tokens/s", "1.16.0", packing=True, batch_size=3),
    Task("SFT b, TRL packing", "sft", "b", "real tokens/s", "1.16.0", packing=True, batch_size=3),
    Task("RM a", "rm", "a", "pairs/s", "1.16.0", 2.0, 3.0),
    Task("RM b", "rm", "b", "pairs/s", "1.16.0", 2.0, 3.0),
    Task("PPO a, 1 epoch", "ppo", "a", "episodes/s", "1.12.0", 2.5, 5.0),
    Task("PPO a, 4 epochs", "ppo", "a", "episodes/s", "1.12.0", 2.3, 4.0, epochs=4),
    Task("PPO b, 1 epoch", "ppo", "b", "episodes/s", "1.12.0", 3.0, 4.0),
    Task("rollouts a", "rollout", "a", "useful tokens/s", "1.12.0", 2.9, 5.0),
    Task("rollouts b", "rollout", "b", "useful tokens/s", "1.12.0"),
]


def main() -> None:
    """Measure the selected tasks and write the report."""
    args = parse()
    work = args.work.resolve()
    results = work / ("results" if args.precision == "auto" else f"results-{args.precision}")
    results.mkdir(parents=True, exist_ok=True)
    if not args.report:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        began = time.monotonic()
        pythons = {"1.12.0": args.trl_ppo_python, "1.16.0": args.trl_sft_python}
        tasks = [t for t in TASKS if t.kind in args.only and t.model in args.models]
        for release in sorted(TRL if "startup" in args.only else {task.trl for task in tasks}):
            pythons[release] = pythons[release] or make_environment(work / f"trl-{release}", release)
        inputs = {name: make_inputs(work, name) for name in args.models}
        for threads in args.threads:
            cores = sorted(os.sched_getaffinity(0))[-threads:]
            if len(cores) < threads:
                raise SystemExit(f"--threads {threads}: this process may use only {len(cores)} cores")
            limits = [measure_limits(cores)] if "limits" in args.only else []
            for task in tasks:
                pairs = (QUICK_PAIRS if args.quick else PAIRS)[task.kind]
                path = results / f"{task.name}, {threads}.json"
                precision = auto_precision(inputs[task.model]) if args.precision == "auto" else args.precision
                given = prepare(task, inputs[task.model], cores, pairs, work, args.set, precision)
                write_json(path, run_pairs(task, given, pythons[task.trl], pairs))
                print(speed_report.line(json.loads(path.read_text(encoding="utf-8"))), flush=True)
            if limits:
                # Measured before and after: a limit is the best value reached, and other processes may have interfered.
                write_json(results / f"limits-{threads}.json", best_of([*limits, measure_limits(cores)]))
        if "growth" in args.only:
            rounds = ["--rounds", "2"] if args.quick else []
            command = [sys.executable, str(HERE / "growth.py"), "--work", str(work), *rounds]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        if "startup" in args.only:
            times = 3 if args.quick else 7
            write_json(results / "startup.json", startup(pythons, inputs[args.models[0]], work, times))
        minutes = (time.monotonic() - began) / 60
        threads = " ".join(map(str, args.threads))
        chosen = f"--only {','.join(args.only)} --models {' '.join(args.models)} --threads {threads}"
        sets = "".join(f" --set {given}" for given in args.set)
        chosen += " --quick" * args.quick + f" --precision {args.precision}" * (args.precision != "auto")
        command = f"benchmarks/speed.py --work DIR {chosen}{sets}"
        write_json(results / "run.json", speed_report.machine() | {"minutes": minutes, "command": command})
        print(f"{minutes:.1f} minutes")
    out = report_file(work, record=args.record) if args.precision == "auto" else results.with_suffix(".md")
    speed_report.write(results, out)
    print(out)


# --------------------------------------------------------------------------------------- environments


def make_environment(folder: Path, release: str) -> Path:
    """Return the Python of a virtual environment with that release of TRL; create it if it does not exist.

    torch is installed first in its exact version, so that TRL's `torch>=...` does not pull another build.
    """
    python = folder / "bin" / "python"
    if not (folder / "finished").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"creating {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        for what in (TORCH, f"trl=={release}"):
            subprocess.run([*pip, "--constraint", str(TRL[release]), what], check=True)
        (folder / "finished").touch()
    return python


# -------------------------------------------------------------------------------------------- workers


def auto_precision(inputs: Inputs) -> str:
    """What `precision: auto` takes for a model on this processor."""
    return "bfloat16" if has_amx() and speed_report.parameters(inputs.size) >= FASTER_WEIGHTS else "float32"


def prepare(
    task: Task, inputs: Inputs, cores: list[int], pairs: int, work: Path, overrides: Sequence[str], precision: str
) -> dict[str, dict[str, Any]]:
    """The instructions of each side, {"ours": ..., "trl": ...}; writes the files that they name."""
    steps = WARMUP[task.kind] + pairs + 1
    folder = work / "runs" / task.name.replace(" ", "_").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    common = {"kind": task.kind, "cores": cores, "out": str(folder / "trl"), "precision": precision}
    ours, trl = dict(common), common | {"trl": task.trl, "steps": steps}
    config = None
    if task.kind == "sft":
        config = sft_config(inputs.folder, inputs.policy, steps, 1e-4, folder)
        rows = inputs.sft_order(steps, 16)
        trl |= {"model": str(inputs.policy), "learning_rate": 1e-4, "max_length": MAX_LENGTH}
        trl |= {"batch_size": task.batch_size, "packing": task.packing, "data": write_rows(folder, rows)}
    elif task.kind == "rm":
        config = rm_config(inputs.folder, inputs.policy, steps, 1e-4, folder)
        trl |= {"model": str(inputs.rm_start), "learning_rate": 1e-4, "max_length": MAX_LENGTH}
        trl |= {"batch_size": task.batch_size, "data": write_rows(folder, inputs.rm_order(steps, 16))}
    elif task.kind == "ppo":
        config = ppo_config(inputs, task.epochs, steps, folder)
        ours["kept"] = str(folder / "first_rollout.json")
        trl |= {
            "policy": str(inputs.policy),
            "reward_model": str(inputs.reward_model),
            "value_model": str(inputs.reward_model),
            "batches": inputs.prompt_batches(steps, inputs.size.ppo_batch),
            "microbatch_size": TRL_MICROBATCH[task.model][precision],
            "epochs": task.epochs,
            "temperature": TEMPERATURE,
            "max_new_tokens": MAX_NEW_TOKENS,
            "kl_coef": config["ppo"]["kl_coef"],
            "vf_coef": config["ppo"]["vf_coef"],
            "learning_rate": config["optimizer"]["learning_rate"],
        }
    else:
        given = {
            "policy": str(inputs.policy),
            "batches": inputs.prompt_batches(steps, inputs.size.ppo_batch),
            "temperature": TEMPERATURE,
            "max_new_tokens": MAX_NEW_TOKENS,
        }
        ours |= given
        trl |= given
    if config is not None:
        ours["config"] = str(write_config(folder / "config.yaml", config))
        ours["overrides"] = [f"precision={precision}", *overrides]
    trl |= task.options
    return {"ours": ours, "trl": trl}


def write_rows(folder: Path, rows: Sequence[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class Worker:
    """A process that waits at the gate (speed_gate.py)."""

    def __init__(self, python: Path, script: str, given: dict[str, Any], folder: Path):
        self.name = script
        task = folder / f"{Path(script).stem}.json"
        write_json(task, given)
        self.log = folder / f"{Path(script).stem}.log"
        # What our commands set for their own process must not reach TRL's.
        environment = {name: value for name, value in os.environ.items() if name not in OURS} | {
            "OMP_NUM_THREADS": str(len(given["cores"])),
            "HF_HUB_OFFLINE": "1",
            "RLHF_CACHE": str(folder / "cache"),
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        environment["PYTHONPATH"] = str(ROOT) if script == "speed_ours.py" else ""
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(python), str(HERE / script), str(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment,
                text=True,
            )
        self.base = 0

    def wait(self) -> dict[str, Any]:
        """Return its next answer."""
        pipe: IO[str] | None = self.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
            raise SystemExit(f"{tail}\n{self.log}: the process ended with exit code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()
        return self.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def run_pairs(task: Task, given: dict[str, Any], python: Path, pairs: int) -> dict[str, Any]:
    """Run both sides in turn, step by step, with the checks; returns every step of both."""
    folder = Path(given["trl"]["out"]).parent
    print(f"{task.name}, {len(given['ours']['cores'])} threads", flush=True)
    ours = Worker(Path(sys.executable), "speed_ours.py", given["ours"], folder)
    workers, warmup = {"ours": ours}, WARMUP[task.kind]
    tolerances = (
        (BFLOAT16_TOLERANCE, BFLOAT16_TOLERANCE) if given["ours"]["precision"] == "bfloat16" else (TOLERANCE, DRIFT)
    )
    try:
        ours.wait()
        workers["trl"] = trl = Worker(python, "speed_trl.py", given["trl"], folder)
        trl.wait()
        steps: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        checks: dict[str, float] = {}
        for number in range(warmup + pairs):
            if number == warmup:
                for worker in workers.values():
                    worker.ask("forget peak")
            for side in ("ours", "trl") if number % 2 == 0 else ("trl", "ours"):
                if side == "trl" and number == 0 and task.kind == "ppo":
                    checks |= trl.ask("compare", path=given["ours"]["kept"])["gaps"]
                    require(task, checks, tolerances[0])
                steps[side].append(workers[side].ask("go"))
            checks |= compare(task, steps["ours"][-1], steps["trl"][-1], number, tolerances)
    finally:
        for worker in workers.values():
            worker.end()
    return {
        "task": {name: getattr(task, name) for name in ("name", "kind", "model", "unit", "floor", "goal", "epochs")},
        "code": speed_report.code(),
        "packing": task.packing,
        "precision": given["ours"]["precision"],
        "threads": len(given["ours"]["cores"]),
        "warmup": warmup,
        "checks": checks,
        "microbatch": given["trl"].get("microbatch_size"),
        "ours": steps["ours"],
        "trl": steps["trl"],
    }


def compare(
    task: Task,
    ours: dict[str, Any],
    trl: dict[str, Any],
    number: int,
    tolerances: tuple[float, float] = (TOLERANCE, DRIFT),
) -> dict[str, float]:
    """Check that a step has equal tokens and an equal loss on both sides; raises SystemExit otherwise."""
    if task.packing:
        return {}
    if ours["batch"] != trl["batch"]:
        raise SystemExit(f"{task.name}: step {number + 1} has different tokens in TRL and in ours")
    if "loss" not in ours:
        return {}
    gap = abs(ours["loss"] - trl["loss"]) / abs(trl["loss"])
    name = "first loss" if number == 0 else "last loss"
    require(task, {name: gap}, tolerances[number > 0])
    return {name: gap}


def require(task: Task, gaps: dict[str, float], tolerance: float) -> None:
    for name, gap in gaps.items():
        if not gap <= tolerance:
            raise SystemExit(
                f"{task.name}: {name} differs by {gap:.2g} between ours and TRL, at most {tolerance:g} is allowed"
            )


# ------------------------------------------------------------------------------------------- start-up


def startup(
    trl_pythons: dict[str, Path], inputs: Inputs, work: Path, times: int
) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds of whole processes in turn: --help, the first step of `rlhf sft`, its imports."""
    core, folder = max(os.sched_getaffinity(0)), work / "runs" / "startup"
    ours = [sys.executable, "-m", "rlhf_cli"]
    imports = "import torch, transformers; from transformers import AutoModelForCausalLM, AutoTokenizer"
    commands = {
        "rlhf --help": [*ours, "--help"],
        **{f"trl --help, {release}": [str(p.parent / "trl"), "--help"] for release, p in trl_pythons.items()},
        "imports": [sys.executable, "-c", imports],
        "rlhf sft, first step": [*ours, "sft", "--config", str(folder / "config.yaml"), "--quiet"],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(times + 1):
        shutil.rmtree(folder, ignore_errors=True)
        write_config(folder / "config.yaml", sft_config(inputs.folder, inputs.policy, 400, 1e-4, folder))
        for name, command in commands.items():
            taken = seconds(command, core, until=folder if "first step" in name else None)
            if number:
                found[name].append(taken)
    return found


def seconds(command: list[str], core: int, until: Path | None = None) -> tuple[float, float]:
    """(wall, processor) seconds of a process until its end, or until a metrics.jsonl under `until` has a row."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    if until is not None:
        while not any(path.stat().st_size for path in until.rglob("metrics.jsonl")) and process.poll() is None:
            time.sleep(0.005)
        process.kill()
    if process.returncode is not None:
        raise SystemExit(f"{' '.join(command)}: ended before its first step")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    taken = time.perf_counter() - began
    if until is None and status:
        raise SystemExit(f"{' '.join(command)}: failed")
    return taken, usage.ru_utime + usage.ru_stime


# ---------------------------------------------------------------------------------------------- helpers


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def report_file(work: Path, *, record: bool) -> Path:
    """The report's file: the tracked one only with --record."""
    return (HERE if record else work) / "RESULTS.md"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    kinds = ["limits", "sft", "rm", "ppo", "rollout", "growth", "startup"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, models and results")
    parser.add_argument("--only", type=lambda text: text.split(","), default=kinds, help=",".join(kinds))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--quick", action="store_true", help="only a few pairs, to check that everything works")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override for our configs")
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of both sides; auto: as `precision: auto` for each model; others report in DIR/results-PRECISION.md",
    )
    parser.add_argument("--trl-ppo-python", type=Path, help="Python of an environment with TRL 1.12.0")
    parser.add_argument("--trl-sft-python", type=Path, help="Python of an environment with TRL 1.16.0")
    parser.add_argument("--record", action="store_true", help="write the tracked benchmarks/RESULTS.md")
    parser.add_argument("--report", action="store_true", help="only write the report, from existing measurements")
    args = parser.parse_args()
    if args.precision != "auto" and args.record:
        parser.error("--record: RESULTS.md compares both sides in the precision of `auto`. Remove --precision")
    if wrong := set(args.only) - set(kinds):
        parser.error(f"--only: {', '.join(sorted(wrong))}: must be of {', '.join(kinds)}")
    return args


if __name__ == "__main__":
    main()
