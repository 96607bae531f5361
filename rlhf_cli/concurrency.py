"""Await a function for many items, a limited number of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def for_each(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], concurrency: int) -> None:
    """Await `work(item)` for every item, at most `concurrency` at a time.

    The first exception cancels the other calls and is raised.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(item: Item) -> None:
        async with gate:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(one(item))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
