"""Run a program under simulation and hold it to having finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ._loop import SimLoop

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated(Generic[T]):
    """What came of a simulation."""

    value: T  #: what the program returned
    steps: int  #: callbacks that ran (on trio: steps of tasks)
    seconds: float  #: virtual time that went by
    digest: int  #: the same in every process where the schedule was the same


def simulate(
    main: Callable[[], Awaitable[T]],
    *,
    seed: int = 0,
    faults: Mapping[int, Callable[[], object]] | None = None,
    check: Callable[[], object] | None = None,
    order: Literal["random", "fifo"] = "random",
    early_timers: float = 0.1,
    max_steps: int = 100_000,
) -> Simulated[T]:
    """Run *main* on asyncio in virtual time, in an order drawn from *seed*.

    The same arguments give the same run in every process. What fails carries a
    note with the seed and the step.

    Args:
        main: A coroutine function; anyio may be used in it.
        seed: Decides which of the ready callbacks runs, and when timers fall due.
        faults: What to call just before which step, counted from 1. A fault may
            cancel a task, close a gate or kill an engine; it must not await.
        check: Called after every step; what it raises ends the run.
        order: See `SimLoop`.
        early_timers: See `SimLoop`.
        max_steps: See `SimLoop`.

    Raises:
        Hang: Nothing can run any more, or *max_steps* were not enough.
        AssertionError: *main* returned and left tasks behind, or something
            failed where nobody looked.
        Exception: What *main*, a fault or the check raised.
    """
    loop = SimLoop(seed, order=order, early_timers=early_timers, max_steps=max_steps)
    loop.faults.update(faults or {})
    loop.after_step = check
    value = run_on(loop, main, label=f"simulation of seed {seed}")
    digest = loop.digest & 0xFFFFFFFF
    return Simulated(value=value, steps=loop.steps, seconds=loop.time(), digest=digest)


def run_on(loop: SimLoop, main: Callable[[], Awaitable[T]], *, label: str) -> T:
    """Run *main* on *loop*, hold it to having finished, and close the loop."""
    asyncio.set_event_loop(loop)
    try:
        value = loop.run_until_complete(main())
        _assert_finished(loop)
    except BaseException as error:
        error.add_note(f"{label}: {loop.where()}")
        _tear_down(loop)
        raise
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return value


def _assert_finished(loop: SimLoop) -> None:
    left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    if left:
        raise AssertionError(f"tasks left behind: {', '.join(left)}")
    for context in loop.errors:
        error: Any = context.get("exception")
        what = f"failed where nobody looked: {context.get('message')} {error!r}"
        raise AssertionError(what) from error


def _tear_down(loop: SimLoop) -> None:
    """Let the tasks of a failed program end, so that the failure speaks alone."""
    loop.after_step = None
    for turn in range(240):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            return
        for task in tasks:
            # One that has not begun must begin, or it awaits nothing for ever.
            begun = getattr(task.get_coro(), "cr_await", None) is not None
            if begun and turn % 24 == 0:
                task.cancel()
        loop.call_soon(loop.stop)
        with suppress(Exception):
            loop.run_forever()
    for task in asyncio.all_tasks(loop):
        silent: Any = task
        silent._log_destroy_pending = False  # noqa: SLF001 - no other way
