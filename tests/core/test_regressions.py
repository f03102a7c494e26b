"""Mistakes that the tests of the core once missed, each by what it would change."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from functools import partial
from statistics import mean
from typing import Any

import anyio
import pytest

from lifecycle import (
    CostTooLarge,
    Gate,
    GateClosed,
    GateFull,
    Payload,
    SessionRegistry,
    Stream,
    managed,
)
from lifecycle.events import AdmissionRefused, Event
from lifecycle.testing import assert_quiescent

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Picture:
    """Something that a weak reference can watch."""


async def test_tells_all_refusals_when_it_closes() -> None:
    """The observer of a gate has seen every refusal when `close` returns."""
    told: list[Event] = []
    gate = Gate(slots=1, observer=told.append)

    async def ask() -> None:
        with pytest.raises(GateClosed):
            await gate.admit()

    with gate.try_admit():
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            gate.close()
            assert sum(isinstance(each, AdmissionRefused) for each in told) == 4


async def test_wakes_every_request_that_a_resize_refuses() -> None:
    """Two waiting requests that can never fit any more are both refused."""
    gate, refused = Gate(slots=4), list[CostTooLarge]()

    async def ask() -> None:
        try:
            await gate.admit(slots=3)
        except CostTooLarge as error:
            refused.append(error)

    with gate.try_admit(slots=4):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            gate.resize(slots=2)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert len(refused) == 2


async def test_detects_a_nested_wait_after_an_inner_block() -> None:
    """A task that left an inner block is known to be inside the outer one."""
    gate = Gate(slots=3)
    with gate.try_admit():
        with gate.try_admit():
            pass
        others = gate.try_admit(slots=2)
        with pytest.raises(RuntimeError, match="inside a with block"):
            with anyio.fail_after(5):
                await gate.admit()
        others.release()
    assert_quiescent(gate)


async def test_counts_a_refusal_once_where_a_deadline_was_set() -> None:
    """A request with a longest wait that the closing gate refuses counts once."""
    gate = Gate(slots=1)

    async def ask() -> None:
        with pytest.raises(GateClosed):
            await gate.admit(max_wait=3600)

    with gate.try_admit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            gate.close()
    now = gate.statistics()
    assert (now.received, now.refused, now.cancelled) == (2, 1, 0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_keeps_no_timer_of_a_wait_that_is_over(anyio_backend: str) -> None:
    """The timer of a longest wait goes with the wait."""
    gate, loop = Gate(slots=1), asyncio.get_running_loop()
    before = {id(timer) for timer in loop._scheduled if not timer.cancelled()}
    for _ in range(10):
        lease = gate.try_admit()
        waiting = asyncio.ensure_future(gate.admit(max_wait=3600))
        await anyio.wait_all_tasks_blocked()
        lease.release()
        (await waiting).release()
    after = {id(timer) for timer in loop._scheduled if not timer.cancelled()}
    assert after <= before


def raise_other(picture: Picture) -> None:
    """Raise an error while another one, which holds the picture, is handled."""

    def read(it: Picture) -> None:
        raise KeyError

    try:
        read(picture)
    except KeyError:
        raise OSError


def raise_group(picture: Picture) -> None:
    """Raise a group of an error that holds the picture."""

    def read(it: Picture) -> None:
        raise KeyError

    try:
        read(picture)
    except KeyError as error:
        raise ExceptionGroup("several", [error]) from None


@pytest.mark.parametrize("raising", [raise_other, raise_group])
def test_forgets_payloads_behind_an_error(raising: Any, no_collector: None) -> None:
    """A payload in the frames of a context or of a group's member is dropped."""
    picture = Picture()
    alive = weakref.ref(picture)
    kept = None
    try:
        raising(picture)
    except (OSError, ExceptionGroup) as error:
        kept = error
    del picture
    assert kept is not None and alive() is not None
    if isinstance(kept, ExceptionGroup):
        kept.__context__ = None  # it is the member itself
    Payload.forget(kept)
    assert alive() is None


async def test_frees_a_start_function_while_its_error_is_kept(
    no_collector: None,
) -> None:
    """The error of a failed start does not keep what the start was given."""
    picture = Picture()
    alive = weakref.ref(picture)

    async def send(it: Picture) -> None:
        await anyio.lowlevel.checkpoint()
        raise ValueError

    opening = partial(send, picture)
    del picture
    kept = None
    async with SessionRegistry() as sessions:
        try:
            with sessions.open("a") as session:
                starting = session.start(opening)
                del opening
                try:
                    await starting
                finally:
                    del starting
        except ValueError as error:
            kept = error
        assert kept is not None
        assert alive() is None
    gc.collect()


async def test_raises_the_first_failure_before_the_other_starts_settle() -> None:
    """A start that goes on does not keep its sibling's error from the caller."""
    going_on = anyio.Event()

    async def fail() -> None:
        raise LookupError

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            with pytest.raises(LookupError), anyio.fail_after(5):
                await session.start_all([(fail, None), (going_on.wait, None)])
            assert session.phase == "starting"
            going_on.set()


async def test_calls_on_close_in_order() -> None:
    """What is called when a stream ends is called in the order it was given."""
    called: list[int] = []

    async def items() -> Any:
        yield 1

    calls = [partial(called.append, number) for number in range(3)]
    async with Stream(items(), on_close=calls):
        pass
    assert called == [0, 1, 2]


async def test_asks_to_retry_later_behind_a_queue() -> None:
    """Behind eight waiting requests, a client retries later than behind none."""
    clock = Clock()
    gate = Gate(slots=1, clock=clock)

    def seconds() -> float:
        with pytest.raises(GateFull) as caught:
            gate.try_admit()
        assert caught.value.retry_after is not None
        return caught.value.retry_after

    lease = gate.try_admit()
    for _ in range(20):
        clock.now += 5
        lease.release()
        lease = gate.try_admit()
        seconds()
    alone = mean(seconds() for _ in range(20))

    async def ask() -> None:
        (await gate.admit()).release()

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        behind = mean(seconds() for _ in range(20))
        lease.release()
    assert behind > 4 * alone


async def test_opens_for_each_task_that_waits_for_an_id() -> None:
    """Two tasks that wait for two ids both get theirs."""
    got: list[str] = []
    async with SessionRegistry() as sessions:
        first, second = sessions.open("a"), sessions.open("b")

        async def wait_for(id_: str) -> None:
            session = await sessions.open_when_free(id_)
            got.append(session.id)
            session.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for, "a")
            tasks.start_soon(wait_for, "b")
            await anyio.wait_all_tasks_blocked()
            first.close()
            second.close()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert sorted(got) == ["a", "b"]


async def test_refuses_to_start_in_another_loop() -> None:
    """A session's start in the event loop of another thread raises."""

    async def nothing() -> None: ...

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:

            async def start() -> None:
                with pytest.raises(RuntimeError, match="loop it was entered in"):
                    with anyio.fail_after(5):
                        await session.start(nothing)

            await anyio.to_thread.run_sync(anyio.run, start)


class Turns:
    """One request at a time of a fair gate, and whose turn it was."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.gate = Gate(order="fair", clock=self.clock, **limits)
        self.granted: list[str] = []

    def serve(self, key: str, seconds: float) -> None:
        """Let a request of *key* hold the gate, where none waits."""
        with self.gate.try_admit(key=key):
            self.clock.now += seconds

    async def ask(self, key: str, **cost: int) -> None:
        """Wait, hold the gate for a second and release it."""
        with await self.gate.admit(key=key, **cost):
            self.granted.append(key)
            self.clock.now += 1


async def test_lets_no_idle_key_save_up_service() -> None:
    """A key that comes back, and a new one, share evenly with a busy one."""
    turns = Turns(slots=1)
    turns.serve("back", 1)
    for _ in range(20):
        turns.serve("busy", 1)
    async with anyio.create_task_group() as tasks:
        with turns.gate.try_admit(key="other"):
            for key in ("back", "new", "busy") * 10:
                tasks.start_soon(turns.ask, key)
            await anyio.wait_all_tasks_blocked()
    first = turns.granted[:15]
    assert all(3 <= first.count(key) <= 7 for key in ("back", "new", "busy")), first


async def test_lets_small_requests_of_a_key_pass_its_large_ones() -> None:
    """A small request does not wait behind a second large one of the same key."""
    gate = Gate(bytes=100, order="fair")

    async def hold(nbytes: int) -> None:
        with await gate.admit(bytes=nbytes, key="a"):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        with gate.try_admit(bytes=100):
            for nbytes in (60, 60, 60, 5):
                tasks.start_soon(hold, nbytes)
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        assert gate.statistics().bytes_in_use == 65
        tasks.cancel_scope.cancel()


def test_forgets_keys_that_have_nothing_ahead_of_others() -> None:
    """An idle key that would start anew anyway is not remembered."""
    turns = Turns(slots=1)
    for number in range(60):
        turns.serve(f"old {number}", 1)
    for _ in range(100):
        turns.serve("busy", 10)
    for number in range(20):
        turns.serve(f"new {number}", 1)
    assert not [key for key in turns.gate._queue._flows if str(key).startswith("old")]


async def test_expects_a_key_to_hold_as_long_as_before() -> None:
    """A key that held for long is charged for long at once, before it releases."""
    turns = Turns(slots=8)
    for _ in range(20):
        turns.serve("short", 0.1)
        turns.serve("long", 10)
    # Even, as both start anew beside one that has had more.
    for _ in range(20):
        turns.serve("busy", 30)
    granted: list[str] = []

    async def hold(key: str) -> None:
        with await turns.gate.admit(key=key):
            granted.append(key)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        with turns.gate.try_admit(slots=8, key="busy"):
            for key in ("long", "short") * 8:
                tasks.start_soon(hold, key)
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        assert len(granted) == 8
        assert granted.count("long") <= 2
        tasks.cancel_scope.cancel()


async def test_expects_a_new_key_to_hold_as_long_as_others() -> None:
    """A new key is charged for as long as the requests of all keys take."""
    turns = Turns(slots=8)
    for number in range(40):
        turns.serve(f"key {number}", 100)
    before = turns.gate._queue._flows["key 39"].hold_s
    with turns.gate.try_admit(key="new"):
        assert turns.gate._queue._flows["new"].hold_s > before / 2 > 20


async def test_drops_the_arguments_of_a_stream_closed_before_it_began() -> None:
    """Arguments that are in no box are dropped as well, though the stream is kept."""

    class Big:
        """Can be referred to weakly."""

    @managed(gate=Gate(slots=1))
    async def words(big: Big) -> AsyncIterator[str]:
        yield f"a {type(big).__name__}"

    big = Big()
    dead = weakref.ref(big)
    stream = words(big)
    del big
    await stream.aclose()
    assert dead() is None
