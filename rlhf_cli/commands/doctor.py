"""`rlhf doctor`: checks this machine and, if given, the integrity of an artifact directory.

Nothing is modified. Each line is printed as soon as it is known, and torch is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
import os
import platform
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.text import Text

from rlhf_cli.commands.status import runs_in
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.files import digest_file, stored_tensors
from rlhf_cli.printing import printable, size
from rlhf_cli.processes.environment import num_cores
from rlhf_cli.program import install_extra
from rlhf_cli.report.progress import Console
from rlhf_cli.run.artifacts import (
    MANIFEST,
    Manifest,
    model_directory,
    partial_directory,
    read_manifest,
    set_aside_directory,
    stage_directory,
)
from rlhf_cli.run.checkpoint_files import checkpoints_directory, damage_of, list_checkpoints
from rlhf_cli.run.lock import lock_path, owner_of
from rlhf_cli.run.stale import what_changed

if TYPE_CHECKING:
    import torch

NAMES_SHOWN = 5
ARTIFACTS = "the `artifacts` directory of your configs"
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


class Result(NamedTuple):
    """What a check found: how bad it is, its subject, and a sentence."""

    word: Literal["ok", "warning", "problem"]
    what: str
    text: str


ok, warning, problem = partial(Result, "ok"), partial(Result, "warning"), partial(Result, "problem")


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's directory, or that of one stage, to check as well.")
    ] = None,
) -> None:
    """Check this machine and, if given, the integrity of a run's files."""
    if directory is not None and not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory. Give {ARTIFACTS}, or a stage in it")
    console = Console(soft_wrap=True)
    problems = 0
    for line in _lines(directory):
        problems += line.word == "problem"
        text = printable(line.text)
        if console.is_terminal:  # a file keeps one line for each finding
            room = max(20, console.width - 22)
            text = f"\n{'':22}".join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False))
        console.print(Text.assemble((f"{line.word:8}", COLOURS[line.word]), f"{line.what:13} {text}"))
    if problems:
        raise ArtifactError(f"{problems} problem{'s' if problems > 1 else ''}, see above")


def _lines(directory: Path | None) -> Iterator[Result]:
    yield from versions()
    yield from machine()
    yield disk(directory)
    if directory is None:
        return
    if (directory / MANIFEST).exists():
        name = directory.resolve().name
        yield from finished(directory, name)
        if name in STAGES:
            yield from unfinished(directory.resolve().parent, name)
        return
    seen = 0
    for stage in STAGES:
        built = stage_directory(directory, stage)
        lines = [*(finished(built, stage) if built.is_dir() else ()), *unfinished(directory, stage)]
        seen += len(lines)
        yield from lines
    if not seen:
        runs = ", ".join(map(str, runs_in(directory)))
        instead = f", but contains runs: {runs}. Give one of them" if runs else f". Give {ARTIFACTS}"
        yield problem("artifacts", f"{directory}: is not a run{instead}")


def names(items: Sequence[str]) -> str:
    """The first NAMES_SHOWN items, and the number of the others."""
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return ", ".join(items[:NAMES_SHOWN]) + more


def versions() -> Iterator[Result]:
    """Python and the packages that rlhf requires. Imports none of them and downloads nothing."""
    python = platform.python_version()
    try:
        metadata = importlib.metadata.metadata("rlhf-cli")
    except importlib.metadata.PackageNotFoundError:
        yield ok("python", python)
        yield warning("packages", "rlhf-cli is not installed, so the required versions are unknown")
        return
    from packaging.specifiers import SpecifierSet

    required = metadata["Requires-Python"]
    if SpecifierSet(required or "").contains(python, prereleases=True):
        yield ok("python", python)
    else:
        yield problem("python", f"{python} is running, {required} is required")
    yield from packages(metadata.get_all("Requires-Dist") or [])


def packages(requirements: Sequence[str]) -> Iterator[Result]:
    """Compare installed versions with the required ones. Packages of the extra `lora` are optional."""
    from packaging.requirements import Requirement

    others = []
    for requirement in map(Requirement, requirements):
        needed, with_lora = (
            requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in ("", "lora")
        )
        if not needed and not with_lora:
            continue
        name, specifier = requirement.name, requirement.specifier
        advice = f"{specifier} is required. Run: pip install '{name}{specifier}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                yield problem(name, f"not installed, {advice}")
            else:
                others.append(f"{name} not installed (for LoRA: {install_extra('lora', name)})")
            continue
        if not specifier.contains(version, prereleases=True):
            yield problem(name, f"{version} is installed, {advice}")
        elif name in ("torch", "transformers"):
            yield ok(name, version)
        else:
            others.append(f"{name} {version}")
    if others:
        yield ok("packages", ", ".join(others))


def machine() -> Iterator[Result]:
    """Device, threads, speed of bfloat16, and whether training steps are reproducible."""
    try:
        import torch

        from rlhf_cli.models.forward import computes_in_bfloat16
    except Exception as error:
        # A broken installation fails in many ways: a missing package, a missing library, a missing symbol.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        yield problem("torch", f"cannot be imported ({reason[0][:300]}). Install it again")
        return
    cores = num_cores()
    yield ok("device", f"cpu: {_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        memory = f"{size(free)} of {size(total)} free, compute capability {major}.{minor}"
        yield ok("device", f"cuda:{number}: {torch.cuda.get_device_name(number)}, {memory}")
    if device.type == "cpu" and Path("/proc/driver/nvidia/version").exists():
        yield warning("device", f"an NVIDIA driver is loaded, but torch {torch.__version__} finds no GPU")
    yield threads(torch.get_num_threads(), cores, os.getloadavg()[0])
    yield arithmetic(device, computes_in_bfloat16(device, "auto"))
    yield from training(device)


def threads(num_threads: int, cores: int, load: float) -> Result:
    """Compare torch's threads with the cores and the load average of the last minute.

    Threads that share a core wait for each other at the end of every operation. A training step of a small model was
    measured to take several times as long on a busy CPU.
    """
    text = f"torch uses {num_threads} on {cores} cores, the load average is {load:.1f}"
    if num_threads > cores:
        return warning("threads", f"{text}: more threads than cores. Set OMP_NUM_THREADS={cores}")
    if num_threads > 1 and load > cores / 2:
        return warning(
            "threads",
            f"{text}: on a busy CPU the threads wait for each other, and a step can take several times as long. "
            "Set OMP_NUM_THREADS=1 (the result of a stage is the same)",
        )
    return ok("threads", text)


def arithmetic(device: torch.device, auto_is_bfloat16: bool) -> Result:
    """The speed of bfloat16 against float32 in a square matmul, and the choice of `precision: auto`."""
    import torch

    width = 512 if device.type == "cpu" else 4096
    auto = "bfloat16" if auto_is_bfloat16 else "float32"
    try:
        float32, bfloat16 = (_matmul_seconds(device, width, dtype) for dtype in (torch.float32, torch.bfloat16))
    except RuntimeError as error:
        return warning(
            "arithmetic", f"bfloat16 does not work ({str(error).splitlines()[0][:200]}); precision: auto uses {auto}"
        )
    ratio, where = float32 / bfloat16, " on one core" if device.type == "cpu" else ""
    text = (
        f"a {width} x {width} matmul{where} takes {1e3 * float32:.3g} ms in float32 and {1e3 * bfloat16:.3g} ms in "
        f"bfloat16, which is {ratio:.2g} times as fast; precision: auto uses {auto}"
    )
    # Not 1.0: small disturbances by other processes must not cause a warning.
    if auto_is_bfloat16 and ratio < 0.9:
        return warning("arithmetic", f"{text}. Try precision: float32")
    return ok("arithmetic", text)


def _matmul_seconds(device: torch.device, width: int, dtype: torch.dtype) -> float:
    """The best time on one thread. On a CPU it is CPU time: the time of other processes on the core does not count."""
    import torch
    from torch.utils.benchmark import Timer, timer

    a = torch.ones(width, width, dtype=dtype, device=device)
    clock = time.thread_time if device.type == "cpu" else timer  # the latter waits for the GPU
    return min(Timer("a @ a", globals={"a": a}, timer=clock).blocked_autorange(min_run_time=0.2).times)


def training(device: torch.device, seeds: Sequence[int] = (0, 0)) -> Iterator[Result]:
    """Check that training steps are reproducible bit for bit, and that packed rows equal separate forward passes."""
    digests, notes = zip(*(_trained(device, seed) for seed in seeds), strict=True)
    text = f"the same training steps of a tiny Llama on {device} give"
    if len(set(digests)) == 1:
        yield ok("determinism", f"{text} identical weights")
    else:
        wrong = "runs are not reproducible, and a resumed run differs from an uninterrupted one"
        yield problem("determinism", f"{text} different weights each time: {wrong}")
    same = "packed rows give the same result as one forward pass per sequence (a tiny Llama)"
    yield ok("attention", same) if notes[0] is None else warning("attention", notes[0])


def _trained(device: torch.device, seed: int) -> tuple[str, str | None]:
    """(sha256 of a tiny Llama's weights after three training steps, what is wrong with packed rows or None).

    The steps use the SFT stage's forward pass, loss, optimizer and precision.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_cli.algorithms.language_model import lm_loss
    from rlhf_cli.config.stage import Optimizer
    from rlhf_cli.models.forward import autocast, choose_attention, target_logits
    from rlhf_cli.processes.distributed import World
    from rlhf_cli.seeding import generator, seeded
    from rlhf_cli.tensor_ops import token_logprobs
    from rlhf_cli.training.optimizer import build_stepper

    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    with seeded(seed, "doctor"):
        model = LlamaForCausalLM(config)
    # transformers overrides `to` with a signature that type checkers reject.
    torch.nn.Module.to(model, device)
    note = choose_attention(model)
    stepper = build_stepper(model, Optimizer(learning_rate=1e-3, schedule="constant"), 3)
    draw = generator(seed, "doctor rows")
    for _ in range(3):
        rows = [torch.randint(config.vocab_size, (20 + 7 * i,), generator=draw).tolist() for i in range(8)]
        target_mask = [[False] + [True] * (len(row) - 1) for row in rows]
        with autocast(device, "auto"):
            logits, targets = target_logits(model, rows, target_mask)
        loss, _ = lm_loss(token_logprobs(logits, targets), num_tokens=sum(map(sum, target_mask)))
        loss.backward()
        stepper.clip(World(0, 1, device))
        stepper.advance()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest(), note


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


NOT_SAFETENSORS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".h5", ".msgpack", ".gguf"}
MODELS = ("model", "value_model", "ema_model", "best_model")

# ------------------------------------------------------------------------------------------ disk space


def disk(directory: Path | None) -> Result:
    """Compare the free space with what running a stage of `directory` again writes before it is published.

    That is ``models * (1 + 3 * (checkpoints.keep + 1))``: the saved models, and for each checkpoint (one more is being
    written) the weights and AdamW's two moments, all in float32. Adapters need less.
    """
    location = directory if directory is not None else Path.cwd()
    free = shutil.disk_usage(location).free
    text = f"{size(free)} free at {location}"
    if directory is not None and not os.access(directory, os.W_OK):
        return warning("disk", f"{text}, which is not writable: you can inspect it, but not run a stage")
    needs = {}
    for stage, built in _stage_directories(directory).items():
        config = _config_of(stage, built)
        models = sum(weight_bytes(built / name) for name in MODELS) or (_expected_bytes(config) if config else 0)
        if models:
            checkpoints = (config.checkpoints.keep if config is not None else 2) + 1
            needs[stage] = (models * (1 + 3 * checkpoints), f"{size(models)} x (1 + 3 x {checkpoints})")
    if not needs:
        return ok("disk", text)
    most = max(need for need, _ in needs.values())
    sums = ", ".join(f"{stage} {formula} = {size(need)}" for stage, (need, formula) in needs.items())
    text += (
        f"; running a stage again needs up to {size(most)} (its models, and for each checkpoint three times their "
        f"size: the weights and the two moments of AdamW). {sums}"
    )
    if free < most:
        return problem("disk", f"{text}. Free disk space, or lower checkpoints.keep")
    return ok("disk", text)


def _stage_directories(directory: Path | None) -> dict[str, Path]:
    """Each stage and its directory, finished or being built."""
    if directory is None:
        return {}
    if (directory / MANIFEST).exists():
        return {directory.resolve().name: directory}
    directories: dict[str, Path] = {}
    for stage in STAGES:
        for built in (stage_directory(directory, stage), partial_directory(directory, stage)):
            if built.is_dir():
                directories.setdefault(stage, built)
    return directories


def _config_of(stage: str, built: Path) -> Stage | None:
    """The config in a stage's directory; None if this version cannot read it."""
    if stage not in STAGES or not (built / "config.yaml").is_file():
        return None
    try:
        return load_stage_config(stage, built / "config.yaml")
    except ConfigError:
        return None


def _expected_bytes(config: Stage) -> int:
    """The bytes that an unfinished stage will save, from the models it starts from if they are local."""
    of_policy = [role for role in ("model", "policy") if role in config.inputs]
    policy = sum(weight_bytes(Path(model_directory(config.inputs[role][0]))) for role in of_policy)
    with_value_model = isinstance(config, PPOConfig) and config.ppo.has_value_model
    return 2 * policy if with_value_model else policy


def weight_bytes(directory: Path) -> int:
    """Bytes of a model directory's weights in float32; 0 without any."""
    return 4 * sum(math.prod(shape) for _, shape in stored_tensors(directory))


# ---------------------------------------------------------------------------------------------- stages

OUTSIDE = "its manifest names files outside the directory, which were not read"
LINKS = "files were replaced by links, which were not followed"
MISSING, CHANGED = "missing", "modified after they were written"


def finished(directory: Path, stage: str) -> Iterator[Result]:
    """Check a finished stage: its manifest, the digest of every file, foreign files, and whether it is stale."""
    try:
        manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else None
    except ArtifactError as error:
        yield problem(stage, str(error))
        return
    if manifest is None:
        advice = f"has no {MANIFEST}, so it is not a finished stage. Remove it, or run the stage"
        yield problem(stage, f"{directory}: {advice}")
    elif manifest.stage not in STAGES:
        advice = "names an unknown stage. Run the stage again with --restart"
        yield problem(stage, f"{directory / MANIFEST}: {advice}")
    else:
        found = list(files(directory, manifest.files, stage))
        yield from found
        if not any(result.word == "problem" for result in found):
            total = size(sum((directory / name).stat().st_size for name in manifest.files))
            unchanged = f"all unchanged since they were written on {manifest.finished[:10]}"
            yield ok(stage, f"{len(manifest.files)} files, {total}, {unchanged}")
        yield inputs(directory, manifest)


def files(directory: Path, digests: Mapping[str, str], stage: str) -> Iterator[Result]:
    """Check the files of a directory against their digests. Names that lead outside it, and links, are not followed."""
    there = [
        (Path(parent) / name).relative_to(directory)
        for parent, folders, names in os.walk(directory)
        for name in [*names, *(n for n in folders if (Path(parent) / n).is_symlink())]
    ]
    links = {path for path in there if (directory / path).is_symlink()}
    wrong: dict[str, list[str]] = {OUTSIDE: [], LINKS: [], MISSING: [], CHANGED: []}
    for name, digest in digests.items():
        path = Path(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            wrong[OUTSIDE].append(name)
        elif links & {path, *path.parents}:
            wrong[LINKS].append(name)
        elif not (directory / path).is_file():
            wrong[MISSING].append(name)
        else:
            try:
                wrong[CHANGED] += [name] * (digest_file(directory / path) != digest)
            except OSError as error:
                wrong[CHANGED].append(f"{name} (cannot be read: {error.strerror})")
    unwanted = {
        "not written by the stage": sorted({path.as_posix() for path in there} - {*digests, MANIFEST}),
        "not safetensors: rlhf does not read them, and programs that do may run code in them": [
            path.as_posix() for path in there if path.suffix.lower() in NOT_SAFETENSORS
        ],
        "Python code, which rlhf does not run": [path.as_posix() for path in there if path.suffix == ".py"],
    }
    for result, found in ((problem, wrong), (warning, unwanted)):
        yield from (result(stage, f"{directory}: {what}: {names(items)}") for what, items in found.items() if items)


def inputs(directory: Path, manifest: Manifest) -> Result:
    """Check whether the data and inputs of a stage are unchanged."""
    stage, config = manifest.stage, _config_of(manifest.stage, directory)
    if config is None:
        why = "this version of rlhf cannot read its config.yaml, so it is unknown whether it is stale"
        return warning(stage, why)
    try:
        words = what_changed(config, manifest.identity, directory.absolute().parent)
    except OSError as error:
        return warning(stage, f"its data or inputs cannot be read ({error})")
    return warning(stage, words) if words else ok(stage, "its data and inputs are unchanged")


def unfinished(root: Path, stage: str) -> Iterator[Result]:
    """Check for a running process, an interrupted run and its checkpoints, and files left by a killed process."""
    directory, partial = checkpoints_directory(root, stage), partial_directory(root, stage)
    old, lock = set_aside_directory(root, stage), lock_path(root, stage)
    is_lock = lock.is_file() and not lock.is_symlink()
    owner = owner_of(root, stage) if is_lock else None
    if owner is not None:
        yield ok(stage, f"running: {owner}")
    elif is_lock:
        yield ok(stage, f"{lock}: left by a process that has ended; the next run uses it")
    elif lock.exists() or lock.is_symlink():
        yield problem(stage, f"{lock}: is not a lock file of rlhf. Remove it")
    if directory.is_dir() and (partial.is_dir() or owner is not None):
        yield from _checkpoints(directory, stage, is_running=owner is not None)
    elif directory.is_dir():
        yield warning(stage, f"{directory}: left by a finished run, no longer needed. Remove it")
    if owner is None and partial.is_dir() and not list_checkpoints(directory):
        left = "left by a run that was stopped before its first checkpoint; the next run starts over"
        yield warning(stage, f"{partial}: {left}")
    if old.is_dir() and stage_directory(root, stage).exists():
        yield warning(stage, f"{old}: left by an interrupted publication; the next run removes it")
    elif old.is_dir():
        left = "the finished stage, set aside by an interrupted publication; the next run restores it"
        yield warning(stage, f"{old}: {left}")


def _checkpoints(directory: Path, stage: str, *, is_running: bool) -> Iterator[Result]:
    good, damaged = [], []
    for checkpoint in list_checkpoints(directory):
        wrong = _damage(checkpoint)
        if wrong is None:
            good.append(checkpoint.name)
        elif not is_running or checkpoint.exists():  # else the running process removed it meanwhile
            damaged.append(f"{checkpoint.name} ({wrong})")
    if good and not is_running:
        resumes = f"interrupted; the next run resumes from {good[-1]}, {len(good)} good checkpoints in {directory}"
        yield ok(stage, resumes)
    elif good:
        yield ok(stage, f"{len(good)} good checkpoints, the newest {good[-1]}")
    if damaged and good:
        yield warning(stage, f"{directory}: damaged, not used: {names(damaged)}")
    elif damaged:
        yield problem(stage, f"{directory}: every checkpoint is damaged, the next run starts over: {names(damaged)}")
    left = sorted(path.name for path in directory.glob(".*"))
    if left and not is_running:
        yield warning(stage, f"{directory}: temporary files, not used: {names(left)}")


def _damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None. Opens regular files only, and follows no link."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return "not a folder"
    for path in sorted(checkpoint.iterdir()):
        if path.is_symlink() or not path.is_file():
            return f"{path.name} is not a regular file"
    return damage_of(checkpoint)
