"""Cost per item of a stream compared with a bare async generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from time import thread_time

from _measure import Chunk, Goal, in_turns, show

from lifecycle import SessionRegistry, Stream, managed, scrub

# Many: with each change of the kind, the interpreter's inline caches start anew.
ITEMS = 2000
ROUNDS = 100


async def items(picture: object) -> AsyncGenerator[int, None]:
    """Yield items forever without waiting."""
    del picture
    while True:
        yield 1


async def streams() -> None:
    """Every kind of stream beside the generator that is in it."""
    scrubbed = scrub("picture")(items)
    limits = {"first_item": 60.0, "idle": 60.0, "total": 600.0}
    async with (
        Stream(items(b"")) as plain,
        Stream(scrubbed(b"")) as of_scrub,
        managed(scrub="picture")(items)(b"") as whole,
        SessionRegistry() as sessions,
    ):
        with sessions.open("benchmark") as session:
            async with session.stream(items(b""), **limits) as watched:
                kinds: dict[str, AsyncIterator[int]] = {
                    "bare generator": items(b""),
                    "scrub": scrubbed(b""),
                    "Stream": plain,
                    "Stream of scrub": of_scrub,
                    "managed": whole,
                    "Stream with deadlines": watched,
                }
                chunks = {name: _chunk(source) for name, source in kinds.items()}
                taken = await in_turns(chunks, ROUNDS)
    # Most is the mark that tells what the source cancels from what others do.
    goal = Goal(extra=1e-6)
    goals = {"scrub": Goal(extra=30e-9), "Stream": goal, "Stream with deadlines": goal}
    show("an item of a stream", taken, goals)


def _chunk(source: AsyncIterator[int]) -> Chunk:
    async def chunk() -> float:
        left = ITEMS
        began = thread_time()
        async for _item in source:
            left -= 1
            if not left:
                break
        return (thread_time() - began) / ITEMS

    return chunk


if __name__ == "__main__":
    asyncio.run(streams())
