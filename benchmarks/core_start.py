"""Cost of a supervised start compared with a bare task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import thread_time

from _measure import Chunk, Goal, in_turns, show

from lifecycle import SessionRegistry

# Short rounds: most of them pass without the machine doing something else.
ROUNDS, STARTS = 400, 25


async def starts() -> None:
    """A session that is opened, started, closed and ended, and a task."""
    async with SessionRegistry() as sessions:

        async def supervised() -> None:
            session = sessions.open("request")
            await session.start(_open, end=_end)
            session.close()

        async def without_end() -> None:
            session = sessions.open("request")
            await session.start(_open)
            session.close()

        chunks = {
            "task and event": _chunk(_bare_task),
            "supervised start": _chunk(supervised),
            "without an end": _chunk(without_end),
        }
        taken = await in_turns(chunks, ROUNDS)
    show("a supervised start", taken, {"supervised start": Goal(seconds=50e-6)})


def _chunk(start: Callable[[], Awaitable[None]]) -> Chunk:
    async def chunk() -> float:
        began = thread_time()
        for _ in range(STARTS):
            await start()
        return (thread_time() - began) / STARTS

    return chunk


async def _open() -> str:
    return "stream"


async def _end(_stream: object) -> None:
    pass


async def _bare_task() -> None:
    done = asyncio.Event()

    async def run() -> None:
        done.set()

    task = asyncio.create_task(run())
    await done.wait()
    await task  # which is over


if __name__ == "__main__":
    asyncio.run(starts())
