"""Your own Python functions as rewards: one score per response, or one per token."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlhf_cli.algorithms.names import EVALUATION_FIGURES
from rlhf_cli.config.rewards import FunctionReward
from rlhf_cli.data.records import batched
from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.signals import is_interrupt
from rlhf_cli.rewards.base import RewardSource, Samples, finite, shown
from rlhf_cli.rewards.concurrency import for_each
from rlhf_cli.rewards.guard import user_code
from rlhf_cli.run.artifacts import fingerprint
from rlhf_cli.run.identity import imported_files

CONCURRENCY = 8
FOLDERS: set[Path] = set()  # the folders of the files that were loaded so far


@dataclass(kw_only=True)
class PythonFunction(RewardSource):
    """A function of (prompts, responses, rows) that returns one number per response, or one list per response."""

    kind: ClassVar[str] = "reward function"
    function: Callable[..., Any]
    batch_size: int | None = None  # rows per call; None passes all rows in one call
    concurrency: int = CONCURRENCY
    timeout_s: float | None = None
    runner: asyncio.Runner | None = field(default=None, repr=False)
    """One event loop for all calls of an async function, so that it can keep a client open."""

    def score(self, samples: Samples) -> torch.Tensor:
        return torch.tensor([math.nan if value is None else value for value in self.values(samples, finite)])

    def score_per_token(self, samples: Samples) -> list[list[float] | None]:
        rows: list[list[float] | None] = self.values(samples, finite_list)
        for number, (row, ids) in enumerate(zip(rows, samples.response_ids, strict=True)):
            if row is not None and len(row) != len(ids):
                rule = f"{len(ids)} tokens. Return one number for each of row['tokens']"
                self.fail(samples, [number], f"returned {len(row)} numbers for {rule}")
                rows[number] = None
        return rows

    @user_code()
    def values(self, samples: Samples, check: Callable[[Any], Any]) -> list[Any]:
        """`check` of the function's value for each row; None for a row that failed."""
        found: list[Any] = [None] * len(samples.responses)
        batches = list(batched(range(len(found)), self.batch_size))
        if not inspect.iscoroutinefunction(self.function):
            for batch in batches:
                try:
                    values = list(self.function(*arguments(samples, batch)))
                except BaseException as error:
                    self.fail(samples, batch, raised(error), error)
                else:
                    self._keep(found, samples, batch, values, check)
            return found

        async def call_async(batch: Sequence[int]) -> None:
            clock = asyncio.timeout(self.timeout_s)
            try:
                async with clock:
                    values = list(await self.function(*arguments(samples, batch)))
            except BaseException as error:
                task = asyncio.current_task()
                is_cancelled = task is not None and task.cancelling() > 0  # code may raise CancelledError without it
                if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and is_cancelled):
                    raise
                problem = f"did not return within {self.timeout_s} s (timeout_s)" if clock.expired() else raised(error)
                self.fail(samples, batch, problem, error)
            else:
                self._keep(found, samples, batch, values, check)

        if self.runner is None:
            self.runner = asyncio.Runner()
            atexit.register(close, self.runner)
        self.runner.run(for_each(batches, call_async, self.concurrency))
        return found

    def _keep(
        self, found: list[Any], samples: Samples, batch: Sequence[int], values: list[Any], check: Callable[[Any], Any]
    ) -> None:
        if len(values) != len(batch):
            self.fail(samples, batch, f"returned {len(values)} values for {len(batch)} responses")
            return
        for row, value in zip(batch, values, strict=True):
            try:
                found[row] = check(value)
            except ValueError as error:
                self.fail(samples, [row], message_of(error))
            except BaseException as error:  # the value is an object of the user's, and its conversion is his code
                self.fail(samples, [row], raised(error), error)


def arguments(samples: Samples, batch: Sequence[int]) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Prompts, responses, and the columns of the prompts' rows with `ended` and, for a per-token reward, `tokens`."""
    rows = []
    for i in batch:
        row = {**samples.rows[i], "ended": samples.ended[i]}
        rows.append(row if samples.tokens is None else {**row, "tokens": samples.tokens[i]})
    return [samples.prompts[i] for i in batch], [samples.responses[i] for i in batch], rows


def close(runner: asyncio.Runner) -> None:
    """Close an event loop without reporting again the errors of calls that a signal interrupted."""
    with contextlib.suppress(BaseException):
        runner.get_loop().set_exception_handler(lambda *_: None)
        runner.close()


def raised(error: BaseException) -> str:
    """The exception of a user's function with its file and line, even SystemExit; a stop signal is raised again."""
    if is_interrupt(error):
        raise error
    last, text = traceback.extract_tb(error.__traceback__)[-1], message_of(error)
    return f"raised {type(error).__name__}{f': {text}' if text else ''} ({Path(last.filename).name}:{last.lineno})"


def message_of(error: BaseException) -> str:
    """The message of an exception of the user's code, on one line; its `__str__` may raise."""
    try:
        return shown(error)
    except BaseException as another:
        if is_interrupt(another):
            raise
        return f"its message raised {type(another).__name__}"


def finite_list(value: Any) -> list[float]:
    """The value as a list of finite floats; raises ValueError for anything else."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
        raise ValueError(f"returned {shown(repr(value))}, it must be a list with one number for each of row['tokens']")
    return [_finite(item, f"token {number}") for number, item in enumerate(value, 1)]


def named_numbers(value: Any) -> dict[str, float]:
    """One row of `evaluation.gold`: a number (named gold) or names with numbers; else raises ValueError."""
    if not isinstance(value, dict):
        return {"gold": finite(value)}
    if not value:
        raise ValueError("no number was returned. Return a number, or a dict of named numbers")
    if taken := sorted({*EVALUATION_FIGURES, "step", "reply", "score"} & value.keys()):
        raise ValueError(f"{taken[0]!r} is the name of another held-out figure. Name the number otherwise")
    return {str(key): _finite(item, key) for key, item in value.items()}


def _finite(value: Any, name: Any) -> float:
    try:
        return finite(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def load_function_reward(reward: FunctionReward, name: str, key: str) -> PythonFunction:
    """The source for one entry of `rewards`; raises ConfigError for keys that do not apply to its function."""
    function = load_function(reward.function)
    for name_of, value in (("concurrency", reward.concurrency), ("timeout_s", reward.timeout_s)):
        if value is not None and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{key}.{name_of}: applies to an `async def` only, and {reward.function} is a plain function. Remove it"
            )
    return PythonFunction(
        name=name,
        weight=reward.share,
        on_error=reward.on_error,
        function=function,
        per_token=reward.per_token,
        batch_size=reward.batch_size,
        concurrency=reward.concurrency or CONCURRENCY,
        timeout_s=reward.timeout_s,
    )


def load_function(reference: str) -> Callable[..., Any]:
    """The function at `path/to/file.py:name`. The file is executed."""
    path, _, name = reference.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"{reference}: no such file (relative to {Path.cwd()})")
    file = Path(path).resolve()
    _require_own_modules(path, file)
    spec = importlib.util.spec_from_file_location(f"rlhf_user_{file.stem}_{fingerprint(path)[:8]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module, and the file may import modules beside it.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))
    try:
        with user_code():
            spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit too: only we end the run
        if is_interrupt(error):
            raise
        raise ConfigError(f"{path}: cannot be imported ({type(error).__name__}: {message_of(error)})") from error
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed sys.path
            sys.path.remove(str(file.parent))
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{reference}: {path} has no function {name}")
    return function


def _require_own_modules(path: str, file: Path) -> None:
    """Raise ConfigError if Python, which imports one module of a name, would give this file another file's module."""
    for module in imported_files(file):
        name = module.relative_to(file.parent).parts[0].removesuffix(".py")
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and Path(loaded).is_relative_to(file.parent):
            continue
        if loaded is not None and any(Path(loaded).is_relative_to(folder) for folder in FOLDERS):
            raise ConfigError(f"{path}: imports {name}, which was imported from {loaded} already. Rename one of them")
    FOLDERS.add(file.parent)
