"""What a supervised start costs beside a bare task: microseconds of one request.

    python benchmarks/core_start.py

Each round times all kinds in turn, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from lifecycle import SessionRegistry

# Short rounds: most of them pass without the machine doing something else.
ROUNDS, STARTS = 400, 25


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


async def measure() -> dict[str, list[float]]:
    """Return microseconds for each kind of start, one figure a round."""
    took: dict[str, list[float]] = {}
    async with SessionRegistry() as sessions:

        async def supervised() -> None:
            session = sessions.open("request")
            await session.start(_open, end=_end)
            session.close()

        async def without_end() -> None:
            session = sessions.open("request")
            await session.start(_open)
            session.close()

        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "bare task and event": _bare_task,
            "supervised start": supervised,
            "without an end": without_end,
        }
        for _ in range(ROUNDS):
            for name, start in kinds.items():
                began = time.perf_counter()
                for _ in range(STARTS):
                    await start()
                seconds = time.perf_counter() - began
                took.setdefault(name, []).append(seconds / STARTS * 1e6)
    return took


def main() -> None:
    """Print one line a kind: the median, and where nine in ten rounds lie."""
    print(f"{'microseconds':<20} {'median':>8} {'5 %':>8} {'95 %':>8}")
    for name, took in asyncio.run(measure()).items():
        cuts = statistics.quantiles(took, n=20)
        middle = statistics.median(took)
        print(f"{name:<20} {middle:>8.1f} {cuts[0]:>8.1f} {cuts[-1]:>8.1f}")


if __name__ == "__main__":
    main()
