"""Small programs for the searches: a few tasks each, and what must be true."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from weakref import ref

import anyio
import anyio.lowlevel
from reentrancy import Arm

from lifecycle import (
    AdmissionTimeout,
    CostTooLarge,
    Gate,
    GateClosed,
    Refused,
    Session,
    SessionEnded,
    SessionRegistry,
    Stream,
    StreamTimeout,
    managed,
)
from lifecycle.testing import Attempt, Script, ScriptedEngine, simulate

Scenario = Callable[[], Awaitable[object]]


class Blob:
    """A payload that can be watched."""

    __slots__ = ("__weakref__",)


def _assert_empty(gate: Gate) -> None:
    now = gate.statistics()
    assert (now.slots_in_use, now.bytes_in_use, now.waiting) == (0, 0, 0), now
    assert now.admitted == now.released, now


# For the explorers: each order of the ready queue.


async def line_with_cancellations() -> None:
    """Four waiters, two of which are cancelled, and one that comes late (B1)."""
    gate = Gate(slots=1)
    inside = 0
    done: set[int] = set()
    scopes = [anyio.CancelScope() for _ in range(4)]

    async def user(i: int) -> None:
        nonlocal inside
        with scopes[i]:
            with await gate.admit():
                inside += 1
                assert inside == 1, "over capacity"
                try:
                    await anyio.lowlevel.checkpoint()
                finally:
                    inside -= 1
            done.add(i)

    async def kill(i: int) -> None:
        scopes[i].cancel()

    async with anyio.create_task_group() as tasks:
        for i in range(3):
            tasks.start_soon(user, i)
        tasks.start_soon(kill, 1)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(user, 3)
    assert done >= {0, 2, 3}
    _assert_empty(gate)


async def large_head_leaves() -> None:
    """A large head is cancelled; the small one behind it fits at once (B12)."""
    gate = Gate(bytes=10)
    first, second = gate.try_admit(bytes=5), gate.try_admit(bytes=5)
    scope = anyio.CancelScope()
    got: list[int] = []

    async def want(nbytes: int, within: anyio.CancelScope) -> None:
        with within, await gate.admit(bytes=nbytes):
            got.append(nbytes)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want, 8, scope)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(want, 2, anyio.CancelScope())
        await anyio.lowlevel.checkpoint()
        first.release()
        scope.cancel()
    second.release()
    assert 2 in got
    _assert_empty(gate)


async def patience_meets_release() -> None:
    """A deadline and a grant in one tick: a lease or an error, nothing between."""
    gate = Gate(slots=1)
    lease = gate.try_admit()

    async def want() -> None:
        try:
            with await gate.admit(max_wait=0.01):
                pass
        except AdmissionTimeout:
            pass

    async def give() -> None:
        await anyio.sleep(0.01)
        lease.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want)
        tasks.start_soon(want)
        tasks.start_soon(give)
    _assert_empty(gate)


async def priority_goes_first() -> None:
    """A waiter of higher priority is granted before an older one of lower."""
    gate = Gate(slots=1)
    lease = gate.try_admit()
    got: list[int] = []

    async def want(priority: int) -> None:
        with await gate.admit(priority=priority):
            got.append(priority)

    async with anyio.create_task_group() as tasks:
        for priority in (0, 5, 0):
            tasks.start_soon(want, priority)
        await _until_waiting(gate, 3)
        lease.release()
    assert got[0] == 5, got


async def lower_priority_stays_behind() -> None:
    """A small request of low priority waits behind a large one of high."""
    gate = Gate(bytes=10)
    lease = gate.try_admit(bytes=5)
    got: list[int] = []

    async def want(nbytes: int, priority: int) -> None:
        with await gate.admit(bytes=nbytes, priority=priority):
            got.append(nbytes)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want, 8, 1)
        await _until_waiting(gate, 1)
        tasks.start_soon(want, 2, 0)
        await _until_waiting(gate, 2)
        gate.resize(bytes=11)  # the small one fits, were it its turn
        assert gate.statistics().waiting == 2
        lease.release()
    assert set(got) == {2, 8}
    _assert_empty(gate)


async def shrinking_refuses_who_never_fits() -> None:
    """A request for more than the capacity is refused, and never granted."""
    gate = Gate(bytes=10)
    lease = gate.try_admit(bytes=4)
    seen: list[str] = []

    async def want(nbytes: int) -> None:
        try:
            with await gate.admit(bytes=nbytes):
                seen.append(f"{nbytes} in")
        except CostTooLarge:
            seen.append(f"{nbytes} out")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want, 9)
        await _until_waiting(gate, 1)
        tasks.start_soon(want, 3)
        await _until_waiting(gate, 2)
        gate.resize(bytes=5)
        gate.resize(bytes=20)
        assert not gate.statistics().waiting
    lease.release()
    assert sorted(seen) == ["3 in", "9 out"]
    _assert_empty(gate)


async def keys_take_turns() -> None:
    """With a fair order, a key that asks much does not shut the other one out."""
    gate = Gate(slots=1, order="fair")
    lease = gate.try_admit(key="much")
    got: list[str] = []

    async def want(key: str) -> None:
        with await gate.admit(key=key):
            got.append(key)
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        for count in range(1, 5):
            tasks.start_soon(want, "much")
            await _until_waiting(gate, count)
        tasks.start_soon(want, "little")
        await _until_waiting(gate, 5)
        lease.release()
    assert "little" in got[:2], got
    _assert_empty(gate)


async def nested_admission_is_seen() -> None:
    """A task that holds a lease of the gate is refused, since its wait would be a deadlock (B18)."""
    gate = Gate(slots=1)
    with await gate.admit():
        try:
            await gate.admit()
        except RuntimeError:
            pass
        else:
            raise AssertionError("admitted twice")
    _assert_empty(gate)


async def lost_lease_comes_back() -> None:
    """A lease that only the collector finds lets the next waiter in."""
    gate = Gate(slots=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        lease = gate.try_admit()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_admit_once, gate)
            await anyio.lowlevel.checkpoint()
            del lease
            gc.collect(0)
    assert gate.statistics().lost == 1
    _assert_empty(gate)


async def _until_waiting(gate: Gate, count: int) -> None:
    while gate.statistics().waiting < count:
        await anyio.lowlevel.checkpoint()


async def _admit_once(gate: Gate) -> None:
    with await gate.admit():
        pass


async def closing_sends_everybody_away() -> None:
    """Waiting and later requests are refused; live leases stay (peers-11)."""
    gate = Gate(slots=1)
    lease = gate.try_admit()
    refused = 0

    async def want() -> None:
        nonlocal refused
        try:
            with await gate.admit():
                pass
        except GateClosed:
            refused += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want)
        tasks.start_soon(want)
        await anyio.lowlevel.checkpoint()
        gate.close()
        assert lease.held
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(want)
    lease.release()
    assert refused == 3
    _assert_empty(gate)


async def raising_the_limit_wakes() -> None:
    """All requests that fit after a raise are admitted without a release (B21)."""
    gate = Gate(slots=0, bytes=10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_admit_once, gate)
        tasks.start_soon(_admit_once, gate)
        await anyio.lowlevel.checkpoint()
        gate.resize(slots=2)
    _assert_empty(gate)


async def settling_down_wakes() -> None:
    """What an estimate gives back lets the next one in."""
    gate = Gate(bytes=10)
    lease = gate.try_admit(bytes=9)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_admit_bytes, gate, 5)
        await anyio.lowlevel.checkpoint()
        lease.settle(bytes=3)
    lease.release()
    _assert_empty(gate)


async def _admit_bytes(gate: Gate, nbytes: int) -> None:
    with await gate.admit(bytes=nbytes):
        assert gate.statistics().bytes_in_use <= 10


async def owner_leaves_while_starting() -> None:
    """The owner is cancelled around the start: END once if it began (peers-17)."""
    engine = ScriptedEngine(Script(items=(0,)))
    gate = Gate(slots=1)
    scope = anyio.CancelScope()
    async with SessionRegistry() as sessions:

        async def own() -> None:
            with scope, sessions.open("a") as session:
                lease = await gate.admit()
                stream = await session.start(
                    partial(engine.start, session.key),
                    end=lambda _: engine.end(session.key),
                    lease=lease,
                )
                async with session.stream(stream) as items:
                    async for _ in items:
                        pass

        async def kill() -> None:
            await anyio.lowlevel.checkpoint()
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own)
            tasks.start_soon(kill)
    assert engine.starts == engine.ends
    assert not (engine.live or engine.early_ends or engine.double_ends)
    _assert_empty(gate)


async def id_is_reused_at_once() -> None:
    """A late cleanup of an old session leaves a newer one alone (peers-28)."""
    engine = ScriptedEngine(Script(start_delay=0.01, end_delay=0.01))
    async with SessionRegistry() as sessions:

        async def request() -> None:
            with suppress(SessionEnded), sessions.open("a") as session:
                await _start(session, engine)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
            while not engine.live:
                await anyio.lowlevel.checkpoint()
            sessions.get("a").stop()
            with sessions.open("a") as newer:
                await _start(newer, engine)
                assert sessions.get("a") is newer
                assert newer.key in engine.live
    assert not engine.live
    assert engine.starts == engine.ends == 2


async def _start(session: Session, engine: ScriptedEngine) -> object:
    return await session.start(
        partial(engine.start, session.key), end=lambda _: engine.end(session.key)
    )


async def stopping_reaches_the_owner() -> None:
    """A session that is ended by id raises at the end of its block (peers-21)."""
    engine = ScriptedEngine(Script(end_delay=0.01))
    seen: list[str] = []
    async with SessionRegistry() as sessions:

        async def own() -> None:
            try:
                with sessions.open("a") as session:
                    await _start(session, engine)
                    await anyio.sleep_forever()
            except SessionEnded as error:
                seen.append(error.outcome)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own)
            await anyio.sleep(0.1)
            await sessions.cancel("a")
            assert not engine.live, "cancel returns when the engine is quiet"
    assert seen == ["cancelled"]


async def start_of_an_ended_session_takes_nothing() -> None:
    """A session that was ended refuses to start, and gives the lease back."""
    engine = ScriptedEngine()
    gate = Gate(slots=1)
    async with SessionRegistry() as sessions:
        with suppress(SessionEnded), sessions.open("a") as session:
            lease = gate.try_admit()
            session.stop()
            await session.start(partial(engine.start, session.key), lease=lease)
    assert not (engine.starts or lease.held)
    _assert_empty(gate)


async def shutdown_cuts_a_start() -> None:
    """A server that stops does not wait for an engine that never answers."""
    engine = ScriptedEngine(Script(start_delay=math.inf))
    gate = Gate(slots=1)
    async with anyio.create_task_group() as tasks:
        async with SessionRegistry() as sessions:

            async def own() -> None:
                with suppress(SessionEnded), sessions.open("a") as session:
                    await session.start(
                        partial(engine.start, session.key),
                        end=lambda _: engine.end(session.key),
                        lease=await gate.admit(),
                        timeout=1e6,
                    )

            tasks.start_soon(own)
            while not engine.live:
                await anyio.lowlevel.checkpoint()
    assert anyio.current_time() < 1e5, "it waited for the start"
    assert not (engine.live or engine.early_ends)
    _assert_empty(gate)


async def failed_child_ends_its_siblings() -> None:
    """All or none, also where the owner stays in its session (peers-33)."""
    engine = ScriptedEngine(
        lambda key: Script(refuse=KeyError("no")) if key == "bad" else Script()
    )
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            with suppress(KeyError):
                await session.start_all(
                    (partial(engine.start, key), lambda _, key=key: engine.end(key))
                    for key in ("one", "bad", "two")
                )
                raise AssertionError("one of them was refused")
            await anyio.sleep(0.05)
            assert not engine.live
    assert engine.ends == engine.starts - 1
    assert not (engine.early_ends or engine.double_ends)


async def managed_call_empties_its_boxes() -> None:
    """What a managed function did not take is gone with the first item (peers-49)."""
    gate = Gate(slots=1)

    @managed(gate=gate, scrub="image")
    async def careless(image: object) -> AsyncIterator[int]:
        yield 1
        yield 2

    payload = Blob()
    seen = ref(payload)
    async with careless(payload) as stream:
        del payload
        await anext(stream)
        assert seen() is None, "kept in a box"
        assert not gate.statistics().slots_in_use
    _assert_empty(gate)


async def refused_managed_call_forgets_its_arguments() -> None:
    """What is refused holds nothing that it was called with, however long it lives."""
    gate = Gate(slots=1, max_waiting=0)
    lease = gate.try_admit()

    @managed(gate=gate)
    async def unserved(image: object) -> AsyncIterator[int]:
        yield 1

    payload = Blob()
    seen = ref(payload)
    stream = unserved(payload)
    del payload
    with suppress(Refused):
        await anext(stream)
    assert seen() is None, "kept by a refused call"
    await stream.aclose()
    if lease is not None:
        lease.release()
    _assert_empty(gate)


async def later_item_is_late() -> None:
    """The limit of later items is shorter than that of the first, and is kept."""
    engine = ScriptedEngine(Script(items=(0, 1), item_delay=2.0))
    async with SessionRegistry() as sessions:
        began = anyio.current_time()
        with suppress(StreamTimeout), sessions.open("a") as session:
            stream = await _start(session, engine)
            async with session.stream(stream, first_item=50, idle=1) as items:
                async for _ in items:
                    pass
        assert sessions.statistics().outcomes["deadline"] == 1
        assert anyio.current_time() - began < 4, "found out too late"


async def source_fails_while_it_is_cancelled() -> None:
    """What goes wrong in closing never takes the place of a cancellation."""

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise OSError

    with anyio.CancelScope() as scope:
        async with Stream(source()) as items:
            await anext(items)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


EXPLORED: tuple[Scenario, ...] = (
    line_with_cancellations,
    large_head_leaves,
    patience_meets_release,
    priority_goes_first,
    lower_priority_stays_behind,
    shrinking_refuses_who_never_fits,
    keys_take_turns,
    nested_admission_is_seen,
    lost_lease_comes_back,
    closing_sends_everybody_away,
    raising_the_limit_wakes,
    settling_down_wakes,
    owner_leaves_while_starting,
    id_is_reused_at_once,
    stopping_reaches_the_owner,
    start_of_an_ended_session_takes_nothing,
    shutdown_cuts_a_start,
    failed_child_ends_its_siblings,
    managed_call_empties_its_boxes,
    refused_managed_call_forgets_its_arguments,
    later_item_is_late,
    source_fails_while_it_is_cancelled,
)


# For cancel_everywhere: each point where a cancellation can land.


async def cancelled_waiter(attempt: Attempt) -> None:
    """A cancelled waiter leaves no trace and passes its grant on (B1)."""
    gate = Gate(slots=1)
    lease = gate.try_admit()

    async def want() -> None:
        with await gate.admit():
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:

        async def give() -> None:
            await anyio.lowlevel.checkpoint()
            lease.release()

        tasks.start_soon(give)
        await attempt(want())
        lease.release()
    _go_straight_in(gate)
    _assert_empty(gate)


async def cancelled_request(attempt: Attempt) -> None:
    """Wherever a request is cut, everything is ended and given back (fault-8)."""
    engine = ScriptedEngine(Script(items=(0, 1)))
    gate = Gate(slots=1, bytes=10)
    async with SessionRegistry() as sessions:

        async def request() -> None:
            with sessions.open("a") as session:
                box = session.box(b"pixels", nbytes=6)
                lease = await gate.admit(bytes=6)

                async def open_() -> object:
                    payload = box.take()
                    box.clear()  # too late to find anything
                    return await engine.start(session.key, payload)

                stream = await session.start(
                    open_, end=lambda _: engine.end(session.key), lease=lease
                )
                async with session.stream(stream) as items:
                    async for _ in items:
                        pass

        await attempt(request())
    assert engine.starts == engine.ends
    assert not (engine.live or engine.early_ends or engine.double_ends)
    now = sessions.statistics()
    assert now.opened == sum(now.outcomes.values()) == 1
    assert not now.payloads
    _assert_empty(gate)


def _go_straight_in(gate: Gate) -> None:
    """A request with none before it does not wait."""
    admission = gate.admit()
    try:
        admission.send(None)
    except StopIteration as admitted:
        admitted.value.release()
    else:
        raise AssertionError("waited for no other request")


CANCELLED = (cancelled_waiter, cancelled_request)


# For reenter_everywhere: a finaliser between any two bytecodes of the gate.


def finaliser_releases(arm: Arm) -> None:
    """A lease is released in the middle of any change of the same gate."""
    gate = Gate(slots=3, bytes=10)
    got: list[int] = []

    async def user(nbytes: int) -> None:
        with await gate.admit(bytes=nbytes):
            got.append(nbytes)
            now = gate.statistics()
            assert now.slots_in_use <= 3
            assert now.bytes_in_use <= 10

    async def main() -> None:
        spare, first = gate.try_admit(bytes=3), gate.try_admit(bytes=3)
        second = gate.try_admit(bytes=4)
        scope = anyio.CancelScope()

        async def leaves() -> None:
            with scope, await gate.admit(bytes=8):
                raise AssertionError("there was no capacity")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaves)
            await _until_waiting(gate, 1)
            for nbytes in (2, 3, 1):
                tasks.start_soon(user, nbytes)
            await _until_waiting(gate, 4)
            arm(spare.release)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
            first.release()
            second.release()
        spare.release()
        assert got == [2, 3, 1], got
        _assert_empty(gate)

    simulate(main, order="fifo", early_timers=0.0)


def finaliser_releases_last(arm: Arm) -> None:
    """A release that comes during another is made without a third to help."""
    gate = Gate(slots=2)
    struck: list[bool] = []

    async def want() -> None:
        with await gate.admit(slots=2):
            pass

    async def main() -> None:
        first, second = gate.try_admit(), gate.try_admit()

        def strike() -> None:
            struck.append(True)
            second.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(want)
            await _until_waiting(gate, 1)
            arm(strike)
            first.release()
            if not struck:
                arm(_nothing)
                second.release()

    simulate(main, order="fifo", early_timers=0.0)


def _nothing() -> None: ...


REENTERED = (finaliser_releases_last, finaliser_releases)
