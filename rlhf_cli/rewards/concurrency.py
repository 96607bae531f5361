"""Await a function for many items, a limited number of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def for_each(items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], concurrency: int) -> list[Result]:
    """The results of `work(item)` for every item, in order. At most `concurrency` are awaited at a time.

    The first exception cancels the other calls and is raised.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(item: Item) -> Result:
        async with gate:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
