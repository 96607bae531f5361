"""The checks of `rlhf doctor` on the machine: versions, device, threads, arithmetic, reproducibility.

torch is imported inside the functions, after the checks that do not need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_cli.commands.doctor_text import Line, size
from rlhf_cli.program import install_extra

if TYPE_CHECKING:
    import torch


def versions() -> Iterator[Line]:
    """Python and the packages that rlhf requires. Imports none of them and downloads nothing."""
    python = platform.python_version()
    try:
        metadata = importlib.metadata.metadata("rlhf-cli")
    except importlib.metadata.PackageNotFoundError:
        yield Line("ok", "python", python)
        yield Line("warning", "packages", "rlhf-cli is not installed, so the required versions are unknown")
        return
    from packaging.specifiers import SpecifierSet

    required = metadata["Requires-Python"]
    if SpecifierSet(required or "").contains(python, prereleases=True):
        yield Line("ok", "python", python)
    else:
        yield Line("problem", "python", f"{python} is running, {required} is required")
    yield from packages(metadata.get_all("Requires-Dist") or [])


def packages(requirements: Sequence[str]) -> Iterator[Line]:
    """Compare installed versions with the required ones. Packages of the extra `lora` are optional."""
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
                    "problem", name, f"not installed, {specifier} is required. Run: pip install '{name}{specifier}'"
                )
            else:
                others.append(f"{name} not installed (for LoRA: {install_extra('lora', name)})")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Line(
                "problem",
                name,
                f"{version} is installed, {specifier} is required. Run: pip install '{name}{specifier}'",
            )
        elif name in ("torch", "transformers"):
            yield Line("ok", name, version)
        else:
            others.append(f"{name} {version}")
    if others:
        yield Line("ok", "packages", ", ".join(others))


def machine() -> Iterator[Line]:
    """Device, threads, speed of bfloat16, and whether training steps are reproducible."""
    try:
        import torch

        from rlhf_cli.models.forward import computes_in_bfloat16
    except Exception as error:
        # A broken installation fails in many ways: a missing package, a missing library, a missing symbol.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        yield Line("problem", "torch", f"cannot be imported ({reason[0][:300]}). Install it again")
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
            f"cuda:{number}: {torch.cuda.get_device_name(number)}, {size(free)} of {size(total)} free, "
            f"compute capability {major}.{minor}",
        )
    if device.type == "cpu" and Path("/proc/driver/nvidia/version").exists():
        yield Line("warning", "device", f"an NVIDIA driver is loaded, but torch {torch.__version__} finds no GPU")
    yield threads(torch.get_num_threads(), cores, os.getloadavg()[0])
    yield arithmetic(device, computes_in_bfloat16(device, "auto"))
    yield from training(device)


def usable_cores() -> int:
    """Cores that this process may use: its CPU affinity, limited by the container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not available on macOS
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))  # "max" is no limit
    return cores


def threads(num_threads: int, cores: int, load: float) -> Line:
    """Compare torch's threads with the cores and the load average of the last minute.

    Threads that share a core wait for each other at the end of every operation. A training step of a small model was
    measured to take several times as long on a busy CPU.
    """
    text = f"torch uses {num_threads} on {cores} cores, the load average is {load:.1f}"
    if num_threads > cores:
        return Line("warning", "threads", f"{text}: more threads than cores. Set OMP_NUM_THREADS={cores}")
    if num_threads > 1 and load > cores / 2:
        return Line(
            "warning",
            "threads",
            f"{text}: on a busy CPU the threads wait for each other, and a step can take several times as long. "
            "Set OMP_NUM_THREADS=1 (the weights differ in the last bits from those of another number of threads)",
        )
    return Line("ok", "threads", text)


def arithmetic(device: torch.device, auto_is_bfloat16: bool) -> Line:
    """The speed of bfloat16 against float32 in a square matmul, and the choice of `precision: auto`."""
    import torch

    size = 512 if device.type == "cpu" else 4096
    auto = "bfloat16" if auto_is_bfloat16 else "float32"
    try:
        float32, bfloat16 = _matmul_seconds(device, size, (torch.float32, torch.bfloat16))
    except RuntimeError as error:
        return Line(
            "warning",
            "arithmetic",
            f"bfloat16 does not work ({str(error).splitlines()[0][:200]}); precision: auto uses {auto}",
        )
    ratio, where = float32 / bfloat16, " on one core" if device.type == "cpu" else ""
    text = (
        f"a {size} x {size} matmul{where} takes {1e3 * float32:.3g} ms in float32 and {1e3 * bfloat16:.3g} ms in "
        f"bfloat16, which is {ratio:.2g} times as fast; precision: auto uses {auto}"
    )
    # Not 1.0: small disturbances by other processes must not cause a warning.
    if auto_is_bfloat16 and ratio < 0.9:
        return Line("warning", "arithmetic", f"{text}. Try precision: float32")
    return Line("ok", "arithmetic", text)


def _matmul_seconds(device: torch.device, size: int, dtypes: Sequence[torch.dtype]) -> list[float]:
    """The best time of each dtype. The dtypes alternate, so that other load on the machine affects them equally.

    On a CPU this is the CPU time of one thread. It leaves out the time in which other processes had the core, and
    several threads would spend theirs waiting for each other.
    """
    import torch

    is_cpu = device.type == "cpu"
    clock, num_threads = time.thread_time if is_cpu else time.perf_counter, torch.get_num_threads()
    matrices = [torch.ones(size, size, dtype=dtype, device=device) for dtype in dtypes]
    best = [math.inf] * len(dtypes)
    # The first turn warms up. The turns end after a second, but there are at least three timed ones.
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
    """Check that training steps are reproducible bit for bit, and that packed rows equal separate forward passes."""
    first, note = training_digest(device)
    second, _ = training_digest(device)
    yield repeats([first, second], device)
    if note is None:
        yield Line(
            "ok", "attention", "packed rows give the same result as one forward pass per sequence (a tiny Llama)"
        )
    else:
        yield Line("warning", "attention", note)


def repeats(digests: Sequence[str], device: object) -> Line:
    """Whether the same training steps gave identical weights each time."""
    if len(set(digests)) == 1:
        text = f"the same training steps of a tiny Llama on {device} give identical weights"
        return Line("ok", "determinism", text)
    return Line(
        "problem",
        "determinism",
        f"the same training steps of a tiny Llama on {device} give different weights each time: runs are not "
        "reproducible, and a resumed run differs from an uninterrupted one",
    )


def training_digest(device: torch.device, seed: int = 0) -> tuple[str, str | None]:
    """(sha256 of a tiny Llama's weights after three training steps, what is wrong with packed rows or None).

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
