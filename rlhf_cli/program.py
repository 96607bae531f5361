"""The commands that messages print, written so that they work when they are pasted into the same shell."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def program() -> str:
    """How to call rlhf from this shell.

    `rlhf` if that name is on the PATH and belongs to this Python, else the script beside this Python, such as
    `.venv/bin/rlhf`, else `python -m rlhf_cli`. Under `uv run`, whose PATH ends with the command: `uv run rlhf`.
    """
    if "UV_RUN_RECURSION_DEPTH" in os.environ:
        return "uv run rlhf"
    if _leads_to_ours("rlhf"):
        return "rlhf"
    script = Path(sys.executable).with_name("rlhf")
    return shlex.quote(from_here(script)) if script.is_file() else f"{python()} -m rlhf_cli"


def torchrun() -> str:
    """How to call torchrun from this shell: by its name if the PATH leads to this Python's, else as a module."""
    return "torchrun" if _leads_to_ours("torchrun") else f"{python()} -m torch.distributed.run"


def _leads_to_ours(name: str) -> bool:
    on_path = shutil.which(name)
    return on_path is not None and Path(on_path).resolve() == Path(sys.executable).with_name(name).resolve()


def python() -> str:
    """How to call this Python from this shell: `python` or `python3` if the PATH leads to it, else its path."""
    for name in ("python", "python3"):
        on_path = shutil.which(name)
        # Not resolved: the Python of a virtual environment is a link to another one.
        if on_path is not None and Path(on_path).absolute() == Path(sys.executable).absolute():
            return name
    return shlex.quote(from_here(Path(sys.executable)))


def command(*arguments: str) -> str:
    """An rlhf command, quoted for the shell.

    >>> command("sft", "--config", "my file.yaml").endswith("sft --config 'my file.yaml'")
    True
    """
    return f"{program()} {shlex.join(arguments)}"


def install_extra(extra: str, package: str) -> str:
    """The command that installs an extra from this checkout or, as `rlhf-cli` is on no package index, its package."""
    checkout = Path(__file__).resolve().parent.parent
    has_pip = importlib.util.find_spec("pip") is not None  # `uv venv` makes environments without it
    install = f"{python()} -m pip install" if has_pip else f"uv pip install --python {python()}"
    if (checkout / "pyproject.toml").is_file():
        return f"{install} -e {shlex.quote(f'{from_here(checkout)}[{extra}]')}"
    return f"{install} {package}"


def import_extra(package: str, extra: str, what: str, error: type[Exception]) -> Any:
    """The module of an optional package that `what` needs; raises `error`, which says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        install = install_extra(extra, package)
        raise error(f"{what} needs the package {package} (extra {extra}). Install it: {install}") from None


def set_options(overrides: Sequence[str]) -> list[str]:
    """The `--set` options that give these overrides.

    >>> set_options(["seed=1", "device=cpu"])
    ['--set', 'seed=1', '--set', 'device=cpu']
    """
    return [word for text in overrides for word in ("--set", text)]


def from_here(path: Path) -> str:
    """`path` relative to the working directory if that contains it, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
