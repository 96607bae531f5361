"""Measure the peak memory of real runs, and compare it with what `rlhf plan` computes from their configs.

    python benchmarks/plan_memory.py --work DIR
    python benchmarks/plan_memory.py --work DIR --sizes 1M 25M --stages rm --kinds lora --processes 1
    python benchmarks/plan_memory.py                         # only the table, of the recorded runs

Each run is one stage of two optimizer steps in processes of its own: Llamas with random weights, rows of exactly 128
tokens (64 of prompt, 64 of response), microbatches chosen by `auto`. The peak is the process's largest resident memory
(VmHWM of /proc/self/status) above what is resident after all imports. With two processes the larger peak counts. While
the run goes on, a thread reads the resident memory every 5 ms and notes which function is at work, so that the peak of
each phase is known as well.

The system's allocator keeps freed memory, and gaps between the pieces that are in use. That made up half of the
resident memory and more. So the runs are made with MALLOC_MMAP_THRESHOLD_=131072, which returns every large tensor to
the system when it is freed: what remains is what lives.

Linux only. DIR needs 6 GB with 300 million parameters. On two cores that other work shared, a run took 7 to 190 s up to
25 million parameters, 41 to 201 s at 100 million and 231 to 566 s at 300 million. A finished run is not repeated. The
peaks are recorded in benchmarks/plan_memory.json, from which a test checks the plan.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speed_inputs import Size, word_tokenizer, write_config, write_lines
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_cli.plan.fit import plan_of
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.stages import StagePlan

PLANNED = ("normalisation", "rollout", "scoring", "update", "save")
"""The phases of the plan that a run is seen in."""
RECORD = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "1M": Size(128, 344, 4, 4, 2048, ppo_batch=18, steps=0, learning_rate=0),
    "25M": Size(512, 1376, 6, 8, 8192, ppo_batch=18, steps=0, learning_rate=0),
    "100M": Size(768, 2048, 12, 12, 16384, ppo_batch=18, steps=0, learning_rate=0),
    "300M": Size(1024, 4096, 16, 16, 32768, ppo_batch=18, steps=0, learning_rate=0),
    "152k": Size(256, 688, 4, 4, 151_936, ppo_batch=18, steps=0, learning_rate=0),
}
"""Batches whose equal parts are about the largest that there are (`Budget`): 2,304 tokens."""
STAGES = ("sft", "rm", "ppo")
KINDS = ("float32", "bfloat16", "lora", "nf4", "sharded", "shards", "sharded-bfloat16", "sharded-lora", "long-8bit")
"""`sharded` is float32 with `distributed.shard: true`, for more than one process. `shards` is that of PPO without a
copy of the policy to sample from (`rollout.decoder: sharded`). `long-8bit` has rows of 1,024 tokens, gradient
checkpointing and AdamW's moments in 8 bits."""
PROCESSES = (1, 2, 4)
PROMPT, RESPONSE = 64, 64
LONG = 8
"""How many times as long the prompts and responses of `long-8bit` are."""
EVERY_S = 0.005
PHASES = {
    # The innermost function of the table that is at work gives the phase.
    "load_setup": "load",
    "_model_and_tokenizer": "load",
    "_backbone": "load",
    "_model": "load",
    "samples_of_sft": "normalisation",
    "_draw": "normalisation",
    "collect": "rollout",  # until it has freed what sampling needed
    "_passes": "scoring",
    "sample": "rollout",
    "_iterate": "scoring",
    "_update": "update",
    "_accumulate": "update",
    "update": "update",
    "save_models": "save",
    "save": "save",
    "finish_step": "checkpoint",
    "_write": "checkpoint",
}


@dataclass(frozen=True)
class Case:
    """One run."""

    size: str
    stage: str
    kind: str
    processes: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.stage}-{self.kind}-{self.processes}"


def main() -> None:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where the runs are made; without it only the table is printed")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "25M", "100M"])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--processes", nargs="+", type=int, choices=PROCESSES, default=[1, 2])
    parser.add_argument("--phases", action="store_true", help="print the phases of the recorded runs, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args.child.split(":")[0], Path(args.child.partition(":")[2]))
        return
    if args.work is not None:
        work = args.work.resolve()
        for case in [Case(*x) for x in product_of(args.sizes, args.stages, args.kinds, args.processes)]:
            result = work / "results" / f"{case.name}.json"
            if not result.is_file():
                make_inputs(work, case)
                measure(work, case, result)
        record(work)
    if args.phases:
        print_phases()
    print_table()


def product_of(sizes: list[str], stages: list[str], kinds: list[str], processes: list[int]) -> list[Any]:
    """The cases. One process shards nothing."""
    cases = ((z, s, k, n) for z in sizes for n in processes for s in stages for k in kinds)
    return [
        (size, stage, kind, processes)
        for size, stage, kind, processes in cases
        if not kind.startswith("shard") or (processes > 1 and (stage == "ppo" or kind != "shards"))
    ]


# --------------------------------------------------------------------------------------------- inputs


def folder_of(work: Path, case: Case) -> Path:
    """Where the inputs of a case are."""
    return work / (f"{case.size}-long" if case.kind.startswith("long") else case.size)


def lengths_of(case: Case) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    times = LONG if case.kind.startswith("long") else 1
    return PROMPT * times, RESPONSE * times


def make_inputs(work: Path, case: Case) -> None:
    """Write the base model, a reward model and the rows of a case."""
    folder, size = folder_of(work, case), SIZES[case.size]
    prompt, response = lengths_of(case)
    if (folder / "finished").is_file():
        return
    config = size.config(num_labels=1, dtype="float32")
    tokenizer = word_tokenizer(size.vocabulary)
    for kind, build in (("base", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        build(config).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    draws = (7919 * i % (size.vocabulary - 4) + 4 for i in range(10**9))

    def words(n: int) -> str:
        return " ".join(f"w{next(draws)}" for _ in range(n))

    rows = range(64)
    write_lines(folder / "sft.jsonl", [{"prompt": words(prompt), "response": " " + words(response - 1)} for _ in rows])
    pairs = [
        {"prompt": words(prompt), "chosen": " " + words(response - 1), "rejected": " " + words(response - 1)}
        for _ in rows
    ]
    write_lines(folder / "rm.jsonl", pairs)
    write_lines(folder / "prompts.jsonl", [{"prompt": words(prompt)} for _ in rows])
    (folder / "finished").touch()


def config_of(work: Path, case: Case) -> Path:
    """Write the config of a run."""
    folder, batch = folder_of(work, case), SIZES[case.size].ppo_batch
    prompt, response = lengths_of(case)
    lora = {"lora": {"r": 16, **({"quantize": "nf4"} if case.kind == "nf4" else {})}}
    adapters: dict[str, Any] = lora if case.kind in ("lora", "nf4", "sharded-lora") else {}
    config: dict[str, Any] = {
        "artifacts": str(work / "artifacts" / case.name),
        "device": "cpu",
        "precision": "bfloat16" if "bfloat16" in case.kind else "float32",
        "optimizer": {"learning_rate": 1e-5, "precision": "8bit" if "8bit" in case.kind else "float32"},
        "gradient_checkpointing": case.kind.startswith("long"),
        "checkpoints": {"every_minutes": None},
        "distributed": {"shard": case.kind.startswith("shard")},
    }
    data: dict[str, Any] = {"test_fraction": 0}
    if case.stage == "ppo":
        config |= {
            "policy": {"path": str(folder / "base"), **adapters},
            "rewards": [{"type": "reward_model", "path": str(folder / "reward")}],
            "value_model": adapters,
            "data": data | {"train": str(folder / "prompts.jsonl"), "max_prompt_length": prompt},
            "rollout": {"max_new_tokens": response, "decoder": "sharded" if case.kind == "shards" else "auto"},
            "ppo": {
                "num_iterations": 2,
                "rollout_batch_size": batch,
                "minibatch_size": batch,
                "ppo_epochs": 1,
                "kl_coef": 0.05,
            },
        }
    else:
        config |= {
            "model": {"path": str(folder / "base"), **adapters},
            "data": data | {"train": str(folder / f"{case.stage}.jsonl"), "max_length": prompt + response},
            "training": {"num_steps": 2, "minibatch_size": batch if case.stage == "sft" else batch * 2 // 3},
        }
        if case.stage == "sft":
            config["data"]["loss_on"] = "all"
        else:
            config["evaluation"] = {"num_normalization_samples": 32, "max_new_tokens": response}
    return write_config(work / "configs" / f"{case.name}" / f"{case.stage}.yaml", config)


# ------------------------------------------------------------------------------------------ measuring


def measure(work: Path, case: Case, result: Path) -> None:
    """Run a case in processes of its own, and write what they measured."""
    path = config_of(work, case)
    began = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(case.processes):
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        environment |= {
            "MALLOC_MMAP_THRESHOLD_": "131072",
            "RLHF_CACHE": str(work / "cache"),
            "RANK": str(rank),
            "WORLD_SIZE": str(case.processes),
        }
        environment |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, "--work", str(work), "--child", f"{case.stage}:{path}"]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        print(f"{case.name}: failed", flush=True)
        return
    rows = [json.loads(output.splitlines()[-1]) for output in outputs]
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps({"case": asdict(case), "processes": rows}, indent=1) + "\n")
    peak = max(row["peak"] for row in rows)
    print(f"{case.name}: {peak / 1e6:,.0f} MB, {time.monotonic() - began:.0f} s", flush=True)


def run_child(stage: str, path: Path) -> None:
    """Run a stage in this process, and print its memory as JSON."""
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()
    import importlib
    import shutil

    import torch

    from rlhf_cli.config.by_stage import load_stage_config
    from rlhf_cli.models.quantized import quiet_bitsandbytes

    torch.set_num_threads(1)
    quiet_bitsandbytes()
    for name in ("peft", "bitsandbytes", "transformers.models.llama.modeling_llama", "torch._dynamo"):
        importlib.import_module(name)
    module = importlib.import_module(f"stages.{stage}")
    config = load_stage_config(stage, path)
    if os.environ["RANK"] == "0":
        shutil.rmtree(config.artifacts, ignore_errors=True)
    before = status()["VmRSS"]
    phases: dict[str, int] = {}
    peak_at: list[Any] = [0, []]
    main_thread = threading.main_thread().ident
    running = True

    def watch() -> None:
        while running:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            names = functions(main_thread)
            phase = next((PHASES[name] for name in names if name in PHASES), "start")
            phases[phase] = max(phases.get(phase, 0), resident - before)
            if resident > peak_at[0]:
                peak_at[:] = [resident, names[:8]]
            time.sleep(EVERY_S)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    module.run(config, quiet=True)
    running = False
    watcher.join()
    after = status()
    shutil.rmtree(config.artifacts, ignore_errors=True)
    report = {"peak": after["VmHWM"] - before, "imports": before, "peaks": phases, "at": peak_at[1]}
    print(json.dumps(report))


def functions(thread: int | None) -> list[str]:
    """The functions of the package that a thread is in, the innermost first."""
    frame = sys._current_frames().get(thread or 0)
    names = []
    while frame is not None:
        if "/rlhf_cli/" in frame.f_code.co_filename or "/stages/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def status() -> dict[str, int]:
    """The lines of /proc/self/status that are sizes, in bytes."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


# --------------------------------------------------------------------------------------------- the table


def record(work: Path) -> None:
    """Add the peaks of the finished runs, whole and by phase, to the record."""
    rows = {case_of(row): row for row in recorded()}
    for path in sorted((work / "results").glob("*.json")):
        result = json.loads(path.read_text())
        processes, phases = result["processes"], {}
        for process in processes:
            for name, peak in process["peaks"].items():
                # The samples of RM are its normalisation.
                phase = "normalisation" if (result["case"]["stage"], name) == ("rm", "rollout") else name
                phases[phase] = max(phases.get(phase, 0), peak)
        known = {name: phases[name] for name in PLANNED if name in phases}
        rows[Case(**result["case"])] = result["case"] | {"peak": max(p["peak"] for p in processes), "phases": known}
    order = product_of(list(SIZES), list(STAGES), list(KINDS), list(PROCESSES))
    lines = [json.dumps(rows[Case(*x)]) for x in order if Case(*x) in rows]
    RECORD.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def recorded() -> list[dict[str, Any]]:
    """The recorded runs: the fields of `Case`, the `peak` and, of newer runs, those of the `phases`, in bytes."""
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else []
    return rows


def case_of(row: dict[str, Any]) -> Case:
    """The case of a recorded run."""
    return Case(row["size"], row["stage"], row["kind"], row["processes"])


def planned(case: Case, folder: Path) -> StagePlan:
    """What `rlhf plan` computes for a case, from configs that are written to a folder."""
    for kind in ("base", "reward"):
        SIZES[case.size].config(num_labels=1, dtype="float32").save_pretrained(folder_of(folder, case) / kind)
    path = config_of(folder, case)
    machine = Machine("cpu", 1e12, case.processes)
    (one,) = plan_of(path, [], case.stage, machine, machine.memory, None)
    return one.plan


def print_phases() -> None:
    """Print the measured and the planned peak of each phase of the recorded runs, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        for row in recorded():
            print(case_of(row).name)
            for phase in planned(case_of(row), Path(folder)).phases:
                parts = {name: round(size / 1e6) for name, size in phase.parts.items()}
                measured = row.get("phases", {}).get(phase.name, 0)
                ratio = f"{phase.total / measured - 1:+.0%}" if measured else ""
                print(f"  {phase.name}: {measured / 1e6:,.0f} / {phase.total / 1e6:,.0f} {ratio} {parts}")


def print_table() -> None:
    """Print measured and planned peaks as Markdown, in MB: a row for each size, stage and number of processes."""
    peaks = {case_of(row): row["peak"] for row in recorded()}
    print(f"| size | stage | processes | {' | '.join(KINDS)} |")
    print("| --- " * (3 + len(KINDS)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for size, processes, stage in itertools.product(SIZES, PROCESSES, STAGES):
            cells = []
            for kind in KINDS:
                case = Case(size, stage, kind, processes)
                if case in peaks:
                    total = planned(case, Path(folder)).peak.total
                    cells.append(f"{peaks[case] / 1e6:,.0f} / {total / 1e6:,.0f} ({total / peaks[case] - 1:+.0%})")
                else:
                    cells.append("")
            if any(cells):
                print(f"| {size} | {stage} | {processes} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
