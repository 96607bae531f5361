"""Functions of the user's that score texts, or each of their tokens. They are run as code."""

from __future__ import annotations

import asyncio
import atexit
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

from rlhf_cli.artifacts import fingerprint
from rlhf_cli.config.rewards import FunctionReward
from rlhf_cli.data.batches import chunks
from rlhf_cli.errors import ConfigError
from rlhf_cli.rewards.judged import Judged, RewardSource, finite, in_pieces, shown

CONCURRENCY = 8


@dataclass(kw_only=True)
class PythonFunction(RewardSource):
    """A function that is given prompts, responses and rows, and gives a number for each, or for each token."""

    kind: ClassVar[str] = "reward function"
    function: Callable[..., Any]
    per_token: bool = False
    batch_size: int | None = None
    """Rows of a call; None gives all at once."""
    concurrency: int = CONCURRENCY
    """Calls of an async function under way at once."""
    timeout_s: float | None = None
    runner: asyncio.Runner | None = field(default=None, repr=False)
    """The event loop of an async function, one for the whole run, so that it can keep a client open."""

    def score(self, judged: Judged) -> torch.Tensor:
        """Its numbers, [B] float32."""
        assert not self.per_token, "a dense reward has no number a row; see score_per_token"
        return torch.tensor([math.nan if value is None else value for value in self.values(judged, finite)])

    def score_per_token(self, judged: Judged) -> list[list[float] | None]:
        """Its numbers for each token of each response; None for a row that it has none for."""
        rows: list[list[float] | None] = self.values(judged, finite_list)
        for number, (row, ids) in enumerate(zip(rows, judged.response_ids, strict=True)):
            if row is not None and len(row) != len(ids):
                wanted = f"{len(ids)} tokens. Return one for each of row['tokens']"
                self.fail(judged, [number], f"returned {len(row)} numbers for {wanted}")
                rows[number] = None
        return rows

    def values(self, judged: Judged, check: Callable[[Any], Any]) -> list[Any]:
        """What `check` makes of the function's value for each row, None where there is none."""
        found: list[Any] = [None] * len(judged.responses)
        pieces = list(chunks(range(len(found)), self.batch_size))
        if not inspect.iscoroutinefunction(self.function):
            for piece in pieces:
                try:
                    values = list(self.function(*arguments(judged, piece)))
                except Exception as error:
                    self.fail(judged, piece, raised(error), error)
                else:
                    self._keep(found, judged, piece, values, check)
            return found

        async def ask(piece: Sequence[int]) -> None:
            clock = asyncio.timeout(self.timeout_s)
            try:
                async with clock:
                    values = list(await self.function(*arguments(judged, piece)))
            except Exception as error:
                late = f"did not return within {self.timeout_s} s (timeout_s)" if clock.expired() else raised(error)
                self.fail(judged, piece, late, error)
            else:
                self._keep(found, judged, piece, values, check)

        if self.runner is None:
            self.runner = asyncio.Runner()
            atexit.register(self.runner.close)
        self.runner.run(in_pieces(pieces, ask, self.concurrency))
        return found

    def _keep(
        self, found: list[Any], judged: Judged, piece: Sequence[int], values: list[Any], check: Callable[[Any], Any]
    ) -> None:
        if len(values) != len(piece):
            self.fail(judged, piece, f"returned {len(values)} values for {len(piece)} responses")
            return
        for row, value in zip(piece, values, strict=True):
            try:
                found[row] = check(value)
            except ValueError as error:
                self.fail(judged, [row], str(error))


def arguments(judged: Judged, piece: Sequence[int]) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """What a function is called with for these rows: prompts, responses and the columns of the prompts' rows, which
    also carry whether the response `ended` and, for a dense reward, the text of its `tokens`."""
    rows = []
    for i in piece:
        row = {**judged.rows[i], "ended": judged.ended[i]}
        rows.append(row if judged.tokens is None else {**row, "tokens": judged.tokens[i]})
    return [judged.prompts[i] for i in piece], [judged.responses[i] for i in piece], rows


def raised(error: Exception) -> str:
    """What a function raised, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = shown(str(error))
    return f"raised {type(error).__name__}{f': {text}' if text else ''} ({Path(last.filename).name}:{last.lineno})"


def finite_list(value: Any) -> list[float]:
    """A list of finite floats, or ValueError."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
        raise ValueError(f"returned {shown(repr(value))}, a list of numbers is needed, one for each of row['tokens']")
    numbers = []
    for number, item in enumerate(value, 1):
        try:
            numbers.append(finite(item))
        except ValueError as error:
            raise ValueError(f"token {number}: {error}") from None
    return numbers


def named_numbers(value: Any) -> dict[str, float]:
    """A judge's row, a number (called gold) or a mapping of names to numbers, or ValueError."""
    if not isinstance(value, dict):
        return {"gold": finite(value)}
    found = {}
    for key, item in value.items():
        try:
            found[str(key)] = finite(item)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return found


def call(name: str, function: Callable[..., Any], judged: Judged, check: Callable[[Any], Any]) -> list[Any]:
    """Call a judge of the user's once; what `check` makes of its value for each row.

    Raises RewardError, with the row and the value, where it fails or does not give one good value a row.
    """
    return PythonFunction(name=name, function=function, advice="Mend it").values(judged, check)


def load_function_reward(reward: FunctionReward, name: str, key: str) -> PythonFunction:
    """The source that a config names; raises ConfigError for keys that its function has no use for."""
    function = load_function(reward.function)
    for name_of, value in (("concurrency", reward.concurrency), ("timeout_s", reward.timeout_s)):
        if value is not None and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{key}.{name_of}: is for an `async def`, {reward.function} is a plain function. Remove it"
            )
    return PythonFunction(
        name=name,
        weight=reward.weight,
        on_error=reward.on_error,
        function=function,
        per_token=reward.per_token,
        batch_size=reward.batch_size,
        concurrency=reward.concurrency or CONCURRENCY,
        timeout_s=reward.timeout_s,
    )


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names. The file is run as code."""
    path, _, name = reference.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"{reference}: no such file (looked from {Path.cwd()})")
    place = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"rlhf_user_{place.stem}_{fingerprint(path)[:8]}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up, and the file may import its neighbours.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(place.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path}: can't be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{reference}: {path} has no function {name}")
    return function
