"""What adapters share: argument checks, waiters, errors without their text."""

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lifecycle import Gate, Payload
from lifecycle.lowlevel import (
    DrainRate,
    LoopWaiter,
    ThreadsafeEvent,
    call_soon,
    check_bool,
    check_callable,
    check_choice,
    check_int,
    check_seconds,
    check_type,
    clear_traceback_frames,
    describe_error,
    event_loop_clock,
    new_waiter,
    threadsafe_call,
)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (lambda v: check_type(str, "it must be text", v), "text"),
        (lambda v: check_callable(it=v), print),
        (lambda v: check_bool(it=v), False),
        (lambda v: check_int(it=v), 0),
        (lambda v: check_int(2, it=v), 2),
        (lambda v: check_seconds(it=v), math.inf),
        (lambda v: check_seconds(it=v), 0),
        (lambda v: check_choice(("a", "b"), it=v), "b"),
    ],
)
def test_accepts_valid_options(check: Callable[[object], None], value: object) -> None:
    """An option of the right type within its limits passes each check."""
    check(value)


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (lambda v: check_type(str, "it must be text", v), 1, TypeError, "not int"),
        (lambda v: check_callable(it=v), 1, TypeError, "it must be callable, not int"),
        (lambda v: check_bool(it=v), "no", TypeError, "it must be True or False"),
        (lambda v: check_int(it=v), True, TypeError, "whole number, not bool"),
        (lambda v: check_int(it=v), 1.0, TypeError, "whole number, not float"),
        (lambda v: check_int(2, it=v), 1, ValueError, "it must be 2 or more, not 1"),
        (lambda v: check_seconds(it=v), "1", TypeError, "seconds, not str"),
        (lambda v: check_seconds(it=v), True, TypeError, "seconds, not bool"),
        (lambda v: check_seconds(it=v), -1, ValueError, "0 seconds or more, not -1"),
        (lambda v: check_seconds(it=v), math.nan, ValueError, "or more, not nan"),
        (lambda v: check_choice("ab", it=v), "c", ValueError, "one of a, b, not 'c'"),
    ],
)
def test_refuses_invalid_options(
    check: Callable[[object], None], value: object, error: type, message: str
) -> None:
    """Each check names the option, what it must be and what it was."""
    with pytest.raises(error, match=message):
        check(value)


def test_describes_an_error_without_its_text() -> None:
    """Type, file and line are named; the text, which may be content, is not."""
    assert describe_error(ValueError("secret")) == "ValueError"
    try:
        raise KeyError("secret")
    except KeyError as error:
        described = describe_error(error)
    assert described.startswith("KeyError at test_lowlevel.py:")
    assert "secret" not in described


def test_clears_frames_up_to_a_context_of_the_caller() -> None:
    """Frames of the error are cleared, those of what the caller handles are kept."""

    def fail(value: object) -> None:
        raise ValueError("inner")

    try:
        fail("outer")
    except ValueError as error:
        outer = error
        try:
            fail("inner")
        except ValueError as again:
            inner = again
    frames = [e.__traceback__.tb_next.tb_frame for e in (outer, inner)]
    clear_traceback_frames(inner, until=outer)
    assert [dict(frame.f_locals) for frame in frames] == [{"value": "outer"}, {}]
    Payload.forget(inner)
    assert frames[0].f_locals == {}


@pytest.mark.anyio
async def test_wakes_a_waiter_of_the_same_loop_again_and_again() -> None:
    """A `LoopWaiter` holds one task at a time and serves any number of waits."""
    waiter = LoopWaiter()
    waiter.wake()  # no task waits
    rounds = 0

    async def wait(twice: LoopWaiter) -> None:
        nonlocal rounds
        for _ in range(2):
            await twice.wait()
            rounds += 1

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, waiter)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="another task is waiting"):
                await LoopWaiter.wait(waiter)
            for done in (1, 2):
                waiter.wake()
                await anyio.wait_all_tasks_blocked()
                assert rounds == done
    assert LoopWaiter(waiter).loop is waiter.loop


@pytest.mark.anyio
async def test_frees_a_waiter_by_cancellation() -> None:
    """A cancelled wait leaves the waiter free, whatever the event loop."""
    waiter = LoopWaiter()

    async def wait() -> None:
        await waiter.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            waiter.wake()


@pytest.mark.anyio
async def test_sets_an_event_from_another_thread() -> None:
    """Sets before `wait` returns count as one, and none is lost."""
    event = ThreadsafeEvent()
    with anyio.fail_after(5):
        event.set()
        event.set()
        await event.wait()
        threading.Timer(0.01, event.set).start()
        await event.wait()
    with anyio.move_on_after(0.01) as scope:
        await event.wait()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_calls_into_the_loop_and_tells_its_time() -> None:
    """A call from a thread runs in the loop; the clock is the loop's own."""
    waiter, now = new_waiter(), event_loop_clock()
    call = threadsafe_call()
    await anyio.to_thread.run_sync(call, waiter.wake)
    with anyio.fail_after(5):
        await waiter
    assert abs(now() - anyio.current_time()) < 1


def test_estimates_how_fast_leases_are_released() -> None:
    """The rate gives a retry time for a queue, as it does in a gate's refusals."""
    rate = DrainRate()
    rate.retry_after(1, released=0, now=0.0)
    seconds = rate.retry_after(10, released=5, now=10.0)
    assert 10 <= seconds <= 30
    assert Gate(slots=1).statistics().released == 0


@pytest.mark.anyio
async def test_wakes_no_task_that_was_cancelled_before() -> None:
    """A wake for a wait that was cancelled in the same moment does nothing."""
    waiter = LoopWaiter()
    scope = anyio.CancelScope()

    async def wait() -> None:
        with scope:
            await waiter.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        waiter.wake()


GOLDEN = (5**0.5 - 1) / 2


def jitter(refused: int) -> float:
    """Return the factor of the refusal of that number: from 0.5 to 1.5, well spread."""
    return 0.5 + refused * GOLDEN % 1.0


def test_estimates_by_windows_of_a_second_or_more() -> None:
    """The figures that the estimate is made of, one after another."""
    rate = DrainRate()
    assert rate.seconds_per_release(10, 100.0) == 0.0
    # Nothing was released: the wait so far, and no new window.
    assert rate.seconds_per_release(10, 104.0) == 4.0
    # Less than a second with releases: an answer, and no new window.
    rate = DrainRate()
    rate.restart(10, 100.0)
    assert rate.seconds_per_release(12, 100.5) == 0.25
    # Of exactly a second: a window of its own, the first one counts whole.
    assert rate.seconds_per_release(14, 101.0) == 0.25
    # From there on by weight: three seconds of four.
    assert rate.seconds_per_release(15, 104.0) == 0.25 + 0.75 * (3.0 - 0.25)
    assert rate.seconds_per_release(15, 104.0) == 0.25 + 0.75 * (3.0 - 0.25)
    # A stuck gate: longer and longer, and the window stays open.
    assert rate.seconds_per_release(15, 105.0) == 2.3125 + 0.5 * (1.0 - 2.3125)
    assert rate.seconds_per_release(15, 107.0) == 2.3125 + 0.75 * (3.0 - 2.3125)
    # A restart forgets the window, and no estimate.
    rate.restart(15, 200.0)
    assert rate.seconds_per_release(16, 201.0) == 2.3125 + 0.5 * (1.0 - 2.3125)


@pytest.mark.parametrize(
    ("ahead", "expected"), [(0, 2.0), (1, 2.0), (2, 4.0), (19, 38.0), (999, 40.0)]
)
def test_says_when_to_retry_within_bounds(ahead: int, expected: float) -> None:
    """Ahead times the interval, from 2 to 40 s, times the jitter of each refusal."""
    rate = DrainRate()
    assert rate.retry_after(5, 0, 0.0) == pytest.approx(2.0 * jitter(1))
    for refused in range(2, 40):
        found = rate.retry_after(ahead, 0, 2.0)
        assert found == pytest.approx(expected * jitter(refused))
        assert 1.0 <= found <= 60.0


@pytest.mark.anyio
async def test_calls_soon_in_the_next_turn() -> None:
    """What is to be called soon is called once this task waits, and not before."""
    called: list[bool] = []
    call_soon()(lambda: called.append(True))
    assert not called
    with anyio.fail_after(60):
        while not called:
            await anyio.lowlevel.checkpoint()
    assert called == [True]


@pytest.mark.anyio
async def test_wakes_from_a_thread_while_the_loop_is_at_work() -> None:
    """The loop's own check for calls from other threads finds none."""
    errors, loop = list[BaseException](), None
    with suppress(RuntimeError):  # on trio, which always checks
        loop = asyncio.get_running_loop()
        loop.set_debug(True)

    def wake() -> None:
        try:
            waiter.wake()
        except RuntimeError as error:
            errors.append(error)

    async def wait() -> None:
        nonlocal waiter
        waiter = new_waiter()
        await waiter

    waiter: Any = None
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            thread = threading.Thread(target=wake)
            thread.start()
            thread.join()  # this task runs meanwhile
            if loop is not None:
                loop.set_debug(False)
            assert errors == []
