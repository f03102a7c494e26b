"""The watchdog of a registry: what becomes of those it watches when it dies or forgets."""

import asyncio
import gc
import weakref

import anyio
import anyio.lowlevel
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import SessionRegistry

pytestmark = pytest.mark.anyio


async def open_() -> str:
    await checkpoint()
    return "stream"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.filterwarnings("ignore:coroutine .*_watch.* was never awaited")  # anyio's
@pytest.mark.parametrize("at_once", [True, False])
async def test_ends_all_though_its_watchdog_was_cancelled(at_once: bool) -> None:
    """Also where that was cancelled before its first step, which no code of it sees."""
    ended: list[object] = []

    async def end(stream: object) -> None:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        ended.append(stream)

    async def forever(_: object) -> None:
        await anyio.sleep_forever()

    before, registry = asyncio.all_tasks(), SessionRegistry(end_timeout=0.2)
    with anyio.fail_after(10), pytest.raises(asyncio.CancelledError):
        async with registry as sessions:
            (watch,) = asyncio.all_tasks() - before
            if at_once:
                watch.cancel()
            del watch
            slow, deaf = sessions.open("slow"), sessions.open("deaf")
            await slow.start_all([(open_, end)])
            await deaf.start(open_, end=forever)
            raise asyncio.CancelledError
    assert ended == ["stream"]
    assert registry.statistics().closing == 0
    assert asyncio.all_tasks() == before
    gc.collect()  # while the warning is expected


async def test_looks_a_few_times_at_each_that_it_watches() -> None:
    """Ever more live streams cost no more each: it sweeps when they have doubled."""
    looks = 0

    def look(now: float) -> float:
        nonlocal looks
        looks += 1
        return now + 1000.0

    async with SessionRegistry() as sessions:
        watchdog = sessions._state.watchdog
        for _ in range(5000):
            watchdog.watch(watchdog.clock() + 1000.0, look)
    assert 5000 <= looks <= 4 * 5000


async def test_forgets_the_task_of_a_caller_with_its_start(
    no_collector: None,
) -> None:
    """A start whose deadline is far away does not keep the task that waited for it."""
    callers: list[weakref.ref[object]] = []

    async def request() -> None:
        current = anyio.get_current_task()
        (task,) = (
            each
            for each in gc.get_objects()
            if type(each).__name__ == "Task" and id(each) == current.id
        )
        callers.append(weakref.ref(task))
        del task
        with sessions.open("a") as session:
            await session.start(open_, end=end, timeout=60.0)
        await session.quiet()

    async def end(_: object) -> None: ...

    async with SessionRegistry() as sessions:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
        for _ in range(5):
            await checkpoint()
        assert callers[0]() is None
