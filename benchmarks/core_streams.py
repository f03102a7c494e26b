"""What an item of a stream costs beyond one of a bare async generator, in ns.

Each kind takes turns with the bare generator in chunks so short that a preemption
spoils few of them, and is compared with the chunk beside it. Printed are the median
of the differences with its quartiles, and the difference of the fastest chunks.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator

from lifecycle import SessionRegistry, Stream, managed, scrub

CHUNK = 200
ROUNDS = 600


async def items(picture: object) -> AsyncGenerator[int, None]:
    """Give items for ever, with no wait between them."""
    del picture
    while True:
        yield 1


async def time_chunk(source: AsyncIterator[int]) -> float:
    """Nanoseconds that an item takes, over one chunk."""
    left = CHUNK
    began = time.perf_counter()
    async for _item in source:
        left -= 1
        if not left:
            break
    return 1e9 * (time.perf_counter() - began) / CHUNK


async def compare(name: str, source: AsyncIterator[int]) -> None:
    """Print what an item of *source* costs over one of a bare generator."""
    bare = items(b"")
    for each in (bare, source):
        await time_chunk(each)  # the first item is another matter
    gc.disable()
    pairs = [(await time_chunk(bare), await time_chunk(source)) for _ in range(ROUNDS)]
    gc.enable()
    await bare.aclose()
    low, middle, high = statistics.quantiles((its - b for b, its in pairs), n=4)
    beside, own = (min(column) for column in zip(*pairs, strict=True))
    print(
        f"{name:23}{middle:+5.0f} ns an item ({low:.0f} to {high:.0f}), fastest "
        f"{own - beside:+.0f}, beside a bare one of {beside:.0f} ns"
    )


async def main() -> None:
    """Compare every kind."""
    scrubbed = scrub("picture")(items)
    await compare("scrub", scrubbed(b""))
    async with Stream(items(b"")) as stream:
        await compare("Stream", stream)
    async with Stream(scrubbed(b"")) as stream:
        await compare("Stream of scrub", stream)
    async with managed(scrub="picture")(items)(b"") as stream:
        await compare("managed", stream)
    async with SessionRegistry() as sessions:
        with sessions.open("benchmark") as session:
            limits = {"first_item": 60.0, "idle": 60.0, "total": 600.0}
            async with session.stream(items(b""), **limits) as stream:
                await compare("Stream with deadlines", stream)


if __name__ == "__main__":
    asyncio.run(main())
