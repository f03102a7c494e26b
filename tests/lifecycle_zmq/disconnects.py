"""Clients that leave at random moments; run as a script for as many as you like.

python tests/lifecycle_zmq/disconnects.py [--count 100000] [--seed 1] [--trio]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from lifecycle import EngineLost, SessionRegistry
from lifecycle_zmq import ZmqEngine

AT_ONCE = 64
# What becomes of a client: it reads all, leaves in the middle of an item or of a wait,
# closes its stream, cancels it and reads on, reads nothing, or leaves at any moment.
FATES = ("reads", "breaks", "closes", "cancels", "ignores", "leaves", "leaves")


async def disconnect(
    engine: ZmqEngine, sessions: SessionRegistry, *, count: int, seed: int
) -> Counter[str]:
    """Run so many sessions, 64 at a time; return how often each fate came about.

    Raises:
        AssertionError: A stream gave an item twice, not at all or after its end.
    """
    draw = random.Random(seed)
    fates: Counter[str] = Counter()
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            fate = draw.choice(FATES)
            fates[fate] += 1
            # A third of a millisecond is about when the engine has answered.
            moment = draw.expovariate(1 / 0.001) if fate == "leaves" else 60.0
            with anyio.move_on_after(moment) as scope:
                await _one(engine, sessions, f"r{number}", fate, draw.randrange(12))
            assert fate == "leaves" or not scope.cancelled_caught, fate

    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(work)
    return fates


async def _one(
    engine: ZmqEngine, sessions: SessionRegistry, name: str, fate: str, length: int
) -> None:
    request: dict[str, Any] = {"count": length}
    if length % 4 == 0:  # more than a window, so that credit is under way
        request |= {"size": 9_000, "each": 2, "merge": "never"}
    with sessions.open(name) as session:
        key = session.key
        source = await session.start(
            lambda: engine.start(key, request), end=lambda _: engine.end(key)
        )
        async with session.stream(source) as items:
            if fate == "ignores":
                return
            seen = 0
            async for item in items:
                assert "size" in request or item == [seen]
                seen += 1
                if fate == "breaks":
                    break
                if fate == "closes":
                    await source.aclose()
                if fate == "cancels":
                    engine.cancel(key)
            whole = length * request.get("each", 1)
            assert seen == whole or (fate != "reads" and seen < whole)


async def check_nothing_left(engine: ZmqEngine) -> dict[str, Any]:
    """Return the engine's counters once both sides are quiet.

    Raises:
        AssertionError: A stream is left on either side, or a count does not balance.
    """
    with anyio.fail_after(20):
        while engine.streams or (await engine.status())["live"]:
            await anyio.sleep(0.01)
    status = await engine.status()
    assert status["backend"]["live"] == []
    assert status["starts"] == status["ends"]
    for name in ("held", "bad_frames", "lost_with_peer", "slow_clients"):
        assert status[name] == 0, name
    for name in ("duplicate_ends", "ends_before_start", "ends_of_refused"):
        assert status[name] == 0, name
    return status


async def _run(count: int, seed: int) -> None:
    script = Path(__file__).with_name("scripted_engine.py")
    async with ZmqEngine([sys.executable, str(script), "--step", "0"]) as engine:
        await engine.wait_ready()
        begin = time.perf_counter()
        async with SessionRegistry() as sessions:
            try:
                fates = await disconnect(engine, sessions, count=count, seed=seed)
            except EngineLost:
                print(engine.output)
                raise
        status = await check_nothing_left(engine)
        seconds = time.perf_counter() - begin
    print(
        f"{count:,} sessions in {seconds:.1f} s, {status['starts']:,} of them started, "
        f"0 left: {dict(fates)}"
    )


def main(run: Callable[[int, int], Any] = _run, *, count: int = 100_000) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trio", action="store_true")
    options = parser.parse_args()
    backend = "trio" if options.trio else "asyncio"
    anyio.run(run, options.count, options.seed, backend=backend)


if __name__ == "__main__":
    main()
