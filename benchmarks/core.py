"""Cost of the core compared with alternatives, in one run of less than a minute.

Goals are printed beside the figures, most of them as ratios to asyncio.Semaphore,
which most servers use. Alternatives that are not installed are listed and skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Awaitable, Callable
from time import thread_time

import anyio
from _measure import Chunk, Goal, in_turns, show
from core_start import starts
from core_streams import streams

from lifecycle import Gate, Lease

PAIRS = 200
CROWD = 1_000
STORM = 20_000
CROWDS = 10, 1_000, 10_000
GRANTS = 10

Pair = tuple[Callable[[], Awaitable[object]], Callable[[], object]]


async def main() -> None:
    """Measure and print each section."""
    await uncontended()
    await hand_off()
    await storm("cancel storm, 20,000 waiting, each cancelled, in any order", mix=True)
    await storm("the same, cancelled in the order of arrival", mix=False)
    await fair_order()
    await streams()
    await starts()


def semaphores() -> dict[str, Pair]:
    """Return how to acquire and release the one slot of each limiter."""
    ours, theirs, limiter = (
        asyncio.Semaphore(1),
        anyio.Semaphore(1),
        anyio.CapacityLimiter(1),
    )
    fast = anyio.Semaphore(1, fast_acquire=True)
    pairs: dict[str, Pair] = {
        "asyncio.Semaphore": (ours.acquire, ours.release),
        "anyio.Semaphore": (theirs.acquire, theirs.release),
        "anyio.Semaphore, fast_acquire": (fast.acquire, fast.release),
        "anyio.CapacityLimiter": (limiter.acquire, limiter.release),
    }
    try:
        aiologic = importlib.import_module("aiologic")
    except ImportError:
        return pairs
    for name in ("Semaphore", "CapacityLimiter"):
        other = getattr(aiologic, name)(1)
        pairs[f"aiologic.{name}"] = other.async_acquire, other.async_release
    return pairs


async def uncontended() -> None:
    """Admit a request without contention, in each of the usual forms."""
    gate, fair = (Gate(slots=1, bytes=1_000, order=order) for order in ("fifo", "fair"))

    async def admissions() -> float:
        began = thread_time()
        for _ in range(PAIRS):
            lease = await gate.admit(bytes=100)
            lease.release()
        return (thread_time() - began) / PAIRS

    async def blocks() -> float:
        began = thread_time()
        for _ in range(PAIRS):
            with await gate.admit(bytes=100):
                pass
        return (thread_time() - began) / PAIRS

    async def of_a_key() -> float:
        began = thread_time()
        for _ in range(PAIRS):
            lease = await fair.admit(bytes=100, key="client")
            lease.release()
        return (thread_time() - began) / PAIRS

    def pairs(
        acquire: Callable[[], Awaitable[object]], release: Callable[[], object]
    ) -> Chunk:
        async def chunk() -> float:
            began = thread_time()
            for _ in range(PAIRS):
                await acquire()
                release()
            return (thread_time() - began) / PAIRS

        return chunk

    chunks = {name: pairs(*pair) for name, pair in semaphores().items()}
    ours = {"lifecycle.Gate, with": blocks, "lifecycle.Gate, fair": of_a_key}
    taken = await in_turns(_second(chunks, admissions) | ours, rounds=300)
    goals = {
        "lifecycle.Gate": Goal(times=3.2),
        "lifecycle.Gate, with": Goal(times=6.4),
        "lifecycle.Gate, fair": Goal(times=12.0),
    }
    show("gate, uncontended: admit and release", taken, goals)


async def hand_off() -> None:
    """Pass one slot from each of a thousand waiting tasks to the next."""
    gate = Gate(slots=1, bytes=1_000)

    async def admissions() -> float:
        async def one() -> None:
            lease = await gate.admit(bytes=100)
            lease.release()

        lease = await gate.admit(bytes=100)
        return await _passing(one, lease.release)

    def pairs(
        acquire: Callable[[], Awaitable[object]], release: Callable[[], object]
    ) -> Chunk:
        async def one() -> None:
            await acquire()
            release()

        async def chunk() -> float:
            await acquire()
            return await _passing(one, release)

        return chunk

    chunks = {name: pairs(*pair) for name, pair in semaphores().items()}
    taken = await in_turns(_second(chunks, admissions), rounds=40)
    show("hand-off, a thousand waiting", taken, {"lifecycle.Gate": Goal(times=1.6)})


async def _passing(
    one: Callable[[], Awaitable[None]], release: Callable[[], object]
) -> float:
    tasks = [asyncio.ensure_future(one()) for _ in range(CROWD)]
    await _parked()
    began = thread_time()
    release()
    await asyncio.gather(*tasks)
    return (thread_time() - began) / CROWD


async def fair_order() -> None:
    """One place, passed on among keys that share it evenly, each with a request."""
    chunks = {f"{keys:,} keys waiting": _sharing(keys) for keys in CROWDS}
    taken = await in_turns(chunks, rounds=5, warm=False)
    last = f"{CROWDS[-1]:,} keys waiting"
    show("grants of a fair gate", taken, {last: Goal(times=4.0)})


def _sharing(keys: int) -> Chunk:
    gate = Gate(slots=1, bytes=1_000, order="fair")

    async def one(key: str, leases: asyncio.Queue[Lease]) -> None:
        leases.put_nowait(await gate.admit(bytes=100, key=key))

    async def chunk() -> float:
        leases: asyncio.Queue[Lease] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            for key in range(keys):
                tasks.create_task(one(str(key), leases))
            await _parked()
            began = thread_time()
            for _ in range(GRANTS):
                (await leases.get()).release()
            seconds = (thread_time() - began) / GRANTS
            for _ in range(keys - GRANTS):
                (await leases.get()).release()
        return seconds

    return chunk


async def storm(title: str, *, mix: bool) -> None:
    """All requests of a long queue are cancelled."""
    chance = random.Random(1)
    gate = Gate(slots=1, bytes=1_000)

    async def admissions() -> float:
        lease = await gate.admit(bytes=100)
        seconds = await _leaving(lambda: gate.admit(bytes=100), chance if mix else None)
        lease.release()
        return seconds

    def pairs(
        acquire: Callable[[], Awaitable[object]], release: Callable[[], object]
    ) -> Chunk:
        async def chunk() -> float:
            await acquire()
            seconds = await _leaving(acquire, chance if mix else None)
            release()
            return seconds

        return chunk

    chunks = {name: pairs(*pair) for name, pair in semaphores().items()}
    taken = await in_turns(_second(chunks, admissions), rounds=2, warm=False)
    goal = Goal(times=0.2) if mix else Goal()
    show(title, taken, {"lifecycle.Gate": goal})


async def _leaving(
    acquire: Callable[[], Awaitable[object]], chance: random.Random | None
) -> float:
    async def one() -> None:
        await acquire()

    tasks = [asyncio.ensure_future(one()) for _ in range(STORM)]
    await _parked()
    if chance is not None:
        chance.shuffle(tasks)
    began = thread_time()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (thread_time() - began) / STORM


async def _parked() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _second(chunks: dict[str, Chunk], ours: Chunk) -> dict[str, Chunk]:
    """Return the goal of our row; the first is what all are compared with."""
    (name, basis), *rest = chunks.items()
    return {name: basis, "lifecycle.Gate": ours, **dict(rest)}


if __name__ == "__main__":
    if importlib.util.find_spec("aiologic") is None:
        print("aiologic is not installed, and left out")
    asyncio.run(main())
