"""`rlhf doctor`: can this machine do what a run needs, and is an artifact root as it was written?

Nothing is modified. Each line is printed when it is known, and torch is imported after what can be said without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from rlhf_cli.artifacts import (
    MANIFEST,
    Manifest,
    digest_file,
    model_directory,
    partial_directory,
    read_manifest,
    set_aside_directory,
    stage_directory,
)
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.training.checkpoint_files import checkpoints_directory, found, owner_of, what_is_wrong
from rlhf_cli.training.identity import what_changed

if TYPE_CHECKING:
    import torch

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
NAMES_SHOWN = 5
NOT_SAFETENSORS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".h5", ".msgpack", ".gguf"}
MODELS = ("model", "value_model", "ema_model", "best_model")


@dataclass(frozen=True)
class Line:
    """One finding: how bad it is, what it is about, and what was found."""

    word: Literal["ok", "warning", "problem"]
    what: str
    text: str


def examine(directory: Path | None) -> None:
    """Print a line for each thing that was looked at; raises ArtifactError with their number where there are problems.

    `directory` is an artifact root, or the directory of one stage.
    """
    if directory is not None and not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory. Give the `artifacts` of the configs, or a stage in it")
    console = Console(highlight=False, soft_wrap=True)
    problems = 0
    for line in _lines(directory):
        problems += line.word == "problem"
        # A file's name may hold what a terminal acts on.
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line.text)
        console.print(Text.assemble((f"{line.word:8}", COLOURS[line.word]), f"{line.what:13} {text}"))
    if problems:
        raise ArtifactError(f"{problems} problem{'s' if problems > 1 else ''}, see above")


def _lines(directory: Path | None) -> Iterator[Line]:
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
        place = stage_directory(directory, stage)
        lines = [*(finished(place, stage) if place.is_dir() else ()), *unfinished(directory, stage)]
        seen += len(lines)
        yield from lines
    if not seen:
        runs = dict.fromkeys(str(path.parent.parent) for path in sorted(directory.glob(f"*/*/{MANIFEST}")))
        more = f", but runs are in it: {', '.join(runs)}" if runs else ". Give the `artifacts` of the configs"
        yield Line("problem", "artifacts", f"{directory}: no run{more}")


# ----------------------------------------------------------------------------------------- the machine


def versions() -> Iterator[Line]:
    """Python and the packages that rlhf asks for; nothing is imported and nothing is downloaded."""
    python = platform.python_version()
    try:
        own = importlib.metadata.metadata("rlhf-cli")
    except importlib.metadata.PackageNotFoundError:
        yield Line("ok", "python", python)
        yield Line("warning", "packages", "rlhf-cli is not installed, so the versions it asks for are not known")
        return
    from packaging.specifiers import SpecifierSet

    asked = own["Requires-Python"]
    if SpecifierSet(asked or "").contains(python, prereleases=True):
        yield Line("ok", "python", python)
    else:
        yield Line("problem", "python", f"{python} runs, {asked} is asked for")
    yield from packages(own.get_all("Requires-Dist") or [])


def packages(requirements: Sequence[str]) -> Iterator[Line]:
    """The installed version of each requirement against what it asks for; those of the extra `lora` may be missing."""
    from packaging.requirements import Requirement

    others = []
    for requirement in map(Requirement, requirements):
        needed, with_lora = (
            requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in ("", "lora")
        )
        if not needed and not with_lora:
            continue
        name, specifier = requirement.name, str(requirement.specifier)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                yield Line(
                    "problem", name, f"not installed, {specifier} is asked for. Run: pip install '{name}{specifier}'"
                )
            else:
                others.append(f"{name} not installed (lora needs it)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Line(
                "problem",
                name,
                f"{version} is installed, {specifier} is asked for. Run: pip install '{name}{specifier}'",
            )
        elif name in ("torch", "transformers"):
            yield Line("ok", name, version)
        else:
            others.append(f"{name} {version}")
    if others:
        yield Line("ok", "packages", ", ".join(others))


def machine() -> Iterator[Line]:
    """Device, threads, arithmetic and whether a training step repeats."""
    try:
        import torch

        from rlhf_cli.models.forward import computes_in_bfloat16
    except Exception as error:
        # A broken installation fails in many ways: no such package, no such library, a symbol that is not there.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        yield Line("problem", "torch", f"can't be imported ({reason[0][:300]}). Install it anew")
        return
    cores = usable_cores()
    yield Line("ok", "device", f"cpu: {_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        yield Line(
            "ok",
            "device",
            f"cuda:{number}: {torch.cuda.get_device_name(number)}, {_size(free)} of {_size(total)} free, "
            f"compute capability {major}.{minor}",
        )
    if device.type == "cpu" and Path("/proc/driver/nvidia/version").exists():
        yield Line("warning", "device", f"an NVIDIA driver is here, and torch {torch.__version__} sees no GPU of it")
    yield threads(torch.get_num_threads(), cores, os.getloadavg()[0])
    yield arithmetic(device, computes_in_bfloat16(device, "auto"))
    yield from training(device)


def usable_cores() -> int:
    """Cores that this process may use: those that it is bound to, at most its container's share."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on a Mac
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))  # "max" is no number and sets no bound
    return cores


def threads(num_threads: int, cores: int, load: float) -> Line:
    """torch's threads against the cores and the load average of the last minute.

    Threads that share a core wait for each other at the end of every operation: a training step of a small model was
    measured to take several times as long on a busy CPU.
    """
    text = f"torch takes {num_threads}, on {cores} cores with a load average of {load:.1f}"
    if num_threads > cores:
        return Line("warning", "threads", f"{text}: more than there are cores. Set OMP_NUM_THREADS={cores}")
    if num_threads > 1 and load > cores / 2:
        return Line(
            "warning",
            "threads",
            f"{text}: on a busy CPU they wait for each other, and a step can take several times as long. "
            "Set OMP_NUM_THREADS=1 (weights then differ in the last bits from those of other numbers of threads)",
        )
    return Line("ok", "threads", text)


def arithmetic(device: torch.device, auto_is_bfloat16: bool) -> Line:
    """How fast bfloat16 is here against float32, by a square matmul, and what `precision: auto` takes."""
    import torch

    size = 512 if device.type == "cpu" else 4096
    auto = "bfloat16" if auto_is_bfloat16 else "float32"
    try:
        float32, bfloat16 = _matmul_seconds(device, size, (torch.float32, torch.bfloat16))
    except RuntimeError as error:
        return Line("warning", "arithmetic", f"no bfloat16 here ({str(error).splitlines()[0][:200]}); auto is {auto}")
    ratio, where = float32 / bfloat16, " on one core" if device.type == "cpu" else ""
    text = (
        f"a {size} x {size} matmul{where} takes {1e3 * float32:.3g} ms in float32 and {1e3 * bfloat16:.3g} ms in "
        f"bfloat16, which is {ratio:.2g} times as fast; precision: auto takes {auto}"
    )
    # What little is left of other processes' doing must not make a warning.
    if auto_is_bfloat16 and ratio < 0.9:
        return Line("warning", "arithmetic", f"{text}. Try precision: float32")
    return Line("ok", "arithmetic", text)


def _matmul_seconds(device: torch.device, size: int, dtypes: Sequence[torch.dtype]) -> list[float]:
    """Of each dtype the best of many, taken in turns, so that what else the machine does then meets all alike.

    On a CPU one thread's own seconds: those in which other processes had the core don't count, and several threads
    would spend theirs waiting for each other.
    """
    import torch

    is_cpu = device.type == "cpu"
    clock, num_threads = time.thread_time if is_cpu else time.perf_counter, torch.get_num_threads()
    matrices = [torch.ones(size, size, dtype=dtype, device=device) for dtype in dtypes]
    best = [math.inf] * len(dtypes)
    # The first turn warms up; the turns end after a second, but not before there were three.
    began, turn = time.perf_counter(), 0
    if is_cpu:
        torch.set_num_threads(1)
    while turn < 4 or (turn < 20 and time.perf_counter() - began < 1.0):
        for number, a in enumerate(matrices):
            started = clock()
            a @ a
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                best[number] = min(best[number], clock() - started)
        turn += 1
    torch.set_num_threads(num_threads)
    return best


def training(device: torch.device) -> Iterator[Line]:
    """Do training steps repeat to the last bit, and do packed rows give what one forward pass a sequence gives?"""
    first, note = training_digest(device)
    second, _ = training_digest(device)
    yield repeats([first, second], device)
    if note is None:
        yield Line("ok", "attention", "packed rows give what one forward pass a sequence gives (a tiny Llama)")
    else:
        yield Line("warning", "attention", note)


def repeats(digests: Sequence[str], device: object) -> Line:
    """Whether the weights after the same training steps are the same bytes each time."""
    if len(set(digests)) == 1:
        text = f"the same training steps of a tiny Llama on {device} give the same bytes of weights"
        return Line("ok", "determinism", text)
    return Line(
        "problem",
        "determinism",
        f"the same training steps of a tiny Llama on {device} give other bytes each time: a run does not repeat, and "
        "goes on from a checkpoint as another one",
    )


def training_digest(device: torch.device, seed: int = 0) -> tuple[str, str | None]:
    """(sha256 of a tiny Llama's weights after three training steps, what is wrong with its packed rows or None).

    The steps are those of the SFT stage: its forward pass, loss, optimizer and precision.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_cli.algorithms.language_model import lm_loss
    from rlhf_cli.config.stage import Optimizer
    from rlhf_cli.models.forward import autocast, choose_attention, target_logits
    from rlhf_cli.seeding import generator, seeded
    from rlhf_cli.tensor_ops import token_logprobs
    from rlhf_cli.training.distributed import World
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
    # Unbound, as typing knows it: `to` of a model of transformers is another one.
    torch.nn.Module.to(model, device)
    note = choose_attention(model)
    stepper = build_stepper(model, Optimizer(learning_rate=1e-3, schedule="constant"), 3)
    draw = generator(seed, "doctor rows")
    for _ in range(3):
        rows = [torch.randint(config.vocab_size, (20 + 7 * i,), generator=draw).tolist() for i in range(8)]
        learnt = [[False] + [True] * (len(row) - 1) for row in rows]
        with autocast(device, "auto"):
            logits, targets = target_logits(model, rows, learnt)
        loss, _ = lm_loss(token_logprobs(logits, targets), num_tokens=sum(map(sum, learnt)))
        loss.backward()
        stepper.clip(World(0, 1, device))
        stepper.advance()
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().numpy().tobytes())
    return whole.hexdigest(), note


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# ------------------------------------------------------------------------------------------------ disk


def disk(directory: Path | None) -> Line:
    """Free space against what running a stage of `directory` again writes before it is published.

    ``models * (1 + 3 * (checkpoints.keep + 1))``: what is saved, and for each checkpoint, the one that is being written
    included, weights and AdamW's two moments, all in float32. Adapters take less.
    """
    place = directory if directory is not None else Path.cwd()
    free = shutil.disk_usage(place).free
    text = f"{_size(free)} free at {place}"
    if directory is not None and not os.access(directory, os.W_OK):
        return Line("warning", "disk", f"{text}, which can't be written: it can be looked at, and no stage be run")
    needs = {}
    for stage, own in _stage_directories(directory).items():
        config = _config_of(stage, own)
        models = sum(weight_bytes(own / name) for name in MODELS) or (_models_to_come(config) if config else 0)
        if models:
            checkpoints = (config.checkpoints.keep if config is not None else 2) + 1
            needs[stage] = (models * (1 + 3 * checkpoints), f"{_size(models)} x (1 + 3 x {checkpoints})")
    if not needs:
        return Line("ok", "disk", text)
    most = max(need for need, _ in needs.values())
    sums = ", ".join(f"{stage} {formula} = {_size(need)}" for stage, (need, formula) in needs.items())
    text += f"; a run writes up to {_size(most)} at once: models x (1 + weights and 2 moments x checkpoints): {sums}"
    if free < most:
        return Line("problem", "disk", f"{text}. Make room, or lower checkpoints.keep")
    return Line("ok", "disk", text)


def _stage_directories(directory: Path | None) -> dict[str, Path]:
    """Each stage and where it stands or is being built."""
    if directory is None:
        return {}
    if (directory / MANIFEST).exists():
        return {directory.resolve().name: directory}
    places: dict[str, Path] = {}
    for stage in STAGES:
        for place in (stage_directory(directory, stage), partial_directory(directory, stage)):
            if place.is_dir():
                places.setdefault(stage, place)
    return places


def _config_of(stage: str, place: Path) -> Stage | None:
    if stage not in STAGES or not (place / "config.yaml").is_file():
        return None
    try:
        return load_stage_config(stage, place / "config.yaml")
    except ConfigError:
        return None


def _models_to_come(config: Stage) -> int:
    """What a stage that is not finished will save, by the models that it starts from where they are here."""
    of_policy = [role for role in ("model", "policy") if role in config.inputs]
    own = sum(weight_bytes(Path(model_directory(config.inputs[role][0]))) for role in of_policy)
    with_value_model = isinstance(config, PPOConfig) and config.ppo.has_value_model
    return 2 * own if with_value_model else own


def weight_bytes(directory: Path) -> int:
    """Bytes of the weights in a model directory as float32, by the headers of its safetensors; 0 without any."""
    numbers = 0
    for path in filter(Path.is_file, directory.glob("*.safetensors")):
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100_000_000)))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            numbers += sum(math.prod(entry["shape"]) for entry in tensors)
    return 4 * numbers


# ------------------------------------------------------------------------------------------- the stages


def finished(place: Path, stage: str) -> Iterator[Line]:
    """A finished stage: its manifest, the digest of every file, what is there beside, and whether it is stale."""
    try:
        manifest = read_manifest(place) if (place / MANIFEST).is_file() else None
    except ArtifactError as error:
        yield Line("problem", stage, str(error))
        return
    if manifest is None:
        yield Line("problem", stage, f"{place}: no {MANIFEST}, so it is no finished stage. Remove it, or run the stage")
        return
    if manifest.stage not in STAGES:
        yield Line("problem", stage, f"{place / MANIFEST}: not what rlhf writes. Run the stage again with --restart")
        return
    problems = list(files(place, manifest.files, stage))
    yield from problems
    if not any(line.word == "problem" for line in problems):
        size = sum((place / name).stat().st_size for name in manifest.files)
        text = f"{len(manifest.files)} files, {_size(size)}, each as it was written on {manifest.finished[:10]}"
        yield Line("ok", stage, text)
    yield inputs(place, manifest)


def files(place: Path, digests: Mapping[str, str], stage: str) -> Iterator[Line]:
    """The files of a directory against their digests; a name that leads out of it, or a link, is not followed."""
    outside = [name for name in digests if not _stays_inside(name)]
    links = [name for name in digests if name not in outside and _has_link(place, name)]
    missing, changed = [], []
    for name in digests:
        if name in outside or name in links:
            continue
        path = place / name
        if not path.is_file():
            missing.append(name)
            continue
        try:
            if digest_file(path) != digests[name]:
                changed.append(name)
        except OSError as error:
            changed.append(f"{name} (can't be read: {error.strerror})")
    there = [
        (Path(parent) / name).relative_to(place).as_posix()
        for parent, folders, names in os.walk(place)
        for name in [*names, *(n for n in folders if (Path(parent) / n).is_symlink())]
    ]
    extra = sorted(set(there) - set(digests) - {MANIFEST})
    kinds: list[tuple[Literal["warning", "problem"], list[str], str]] = [
        ("problem", outside, "its manifest names files outside of it, which were not read"),
        ("problem", links, "links where files were written, not followed"),
        ("problem", missing, "missing"),
        ("problem", changed, "changed since they were written"),
        ("warning", extra, "not written by the stage"),
        ("warning", [n for n in there if Path(n).suffix.lower() in NOT_SAFETENSORS],
         "not safetensors: rlhf never reads them, and what does may run code that is in them"),
        ("warning", [n for n in there if Path(n).suffix == ".py"], "code, which rlhf never runs"),
    ]  # fmt: skip
    for word, names, what in kinds:
        if names:
            yield Line(word, stage, f"{place}: {what}: {_names(names)}")


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _has_link(place: Path, name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(place.joinpath(*parts[: n + 1]).is_symlink() for n in range(len(parts)))


def inputs(place: Path, manifest: Manifest) -> Line:
    """Whether what a stage was made from is still the same."""
    stage = manifest.stage
    config = _config_of(stage, place)
    if config is None:
        return Line("warning", stage, "its config.yaml can't be read by this version: whether it is stale is not known")
    try:
        words = what_changed(config, manifest.identity, place.absolute().parent)
    except OSError as error:
        return Line("warning", stage, f"what it was made from can't be read ({error})")
    return Line("warning", stage, words) if words else Line("ok", stage, "what it was made from is unchanged")


def unfinished(root: Path, stage: str) -> Iterator[Line]:
    """Who is writing a stage, an interrupted run and its checkpoints, and what a kill has left behind."""
    place, partial = checkpoints_directory(root, stage), partial_directory(root, stage)
    old, lock = set_aside_directory(root, stage), root / f".{stage}.lock"
    is_lock = lock.is_file() and not lock.is_symlink()
    owner = owner_of(root, stage) if is_lock else None
    if owner is not None:
        yield Line("ok", stage, f"running: {owner}")
    elif is_lock:
        yield Line("ok", stage, f"{lock}: left by a process that is gone; the next run takes it")
    elif lock.exists() or lock.is_symlink():
        yield Line("problem", stage, f"{lock}: no file of ours. Remove it")
    if place.is_dir() and (partial.is_dir() or owner is not None):
        yield from _checkpoints(place, stage, is_running=owner is not None)
    elif place.is_dir():
        yield Line("warning", stage, f"{place}: left behind by a run that was finished, of no use. Remove it")
    if owner is None and partial.is_dir() and not found(place):
        yield Line("warning", stage, f"{partial}: of a run that was stopped before it saved; the next one begins anew")
    if old.is_dir() and stage_directory(root, stage).exists():
        yield Line("warning", stage, f"{old}: left by a publication that was cut off; the next run removes it")
    elif old.is_dir():
        yield Line(
            "warning", stage, f"{old}: the finished stage, its publication was cut off; the next run puts it back"
        )


def _checkpoints(place: Path, stage: str, *, is_running: bool) -> Iterator[Line]:
    good, damaged = [], []
    for checkpoint in found(place):
        wrong = _wrong_with(checkpoint)
        if wrong is None:
            good.append(checkpoint.name)
        elif not is_running or checkpoint.exists():  # else it made room while it was read
            damaged.append(f"{checkpoint.name} ({wrong})")
    if good and not is_running:
        yield Line("ok", stage, f"interrupted; goes on from {good[-1]}, {len(good)} good in {place}")
    elif good:
        yield Line("ok", stage, f"{len(good)} good checkpoints, the newest {good[-1]}")
    if damaged and good:
        yield Line("warning", stage, f"{place}: damaged, and not used: {_names(damaged)}")
    elif damaged:
        text = f"{place}: no checkpoint is good, the next run begins anew: {_names(damaged)}"
        yield Line("problem", stage, text)
    left = sorted(path.name for path in place.glob(".*"))
    if left and not is_running:
        yield Line("warning", stage, f"{place}: half written or half removed, and never read: {_names(left)}")


def _wrong_with(checkpoint: Path) -> str | None:
    """Why a checkpoint can't be used, or None; only files are opened, and no link is followed."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return "no folder"
    for path in sorted(checkpoint.iterdir()):
        if path.is_symlink() or not path.is_file():
            return f"{path.name} is no file"
    try:
        return what_is_wrong(checkpoint)
    except (TypeError, RecursionError):
        return f"its {MANIFEST} can't be read"


# ------------------------------------------------------------------------------------------------ words


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _size(count: float) -> str:
    """Bytes in units of 1000.

    >>> _size(999), _size(20_600_000)
    ('999 B', '20.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
