"""`snapshot`: what gates and registries hold, and that it balances."""

import dataclasses
import gc
import json
import random
import sys
import tracemalloc

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Gate, Lease, SessionRegistry, inspect
from lifecycle.inspect import Snapshot, snapshot


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_snapshot_balances_with_statistics(order):
    """Law 1: at any moment what is in use is the sum of the leases shown."""
    gate = Gate(slots=40, bytes=4000, order=order, clock=Clock())
    other = Gate(slots=1)
    foreign = other.try_admit()
    rng = random.Random(7)
    held: list[Lease] = []
    for _ in range(60):
        if held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held))).release()
        elif held and rng.random() < 0.2:
            rng.choice(held).settle(bytes=rng.randrange(200))
        else:
            held.append(gate.try_admit(slots=rng.randint(1, 2), bytes=50))
        shown, _ = snapshot(gate, other).gates
        assert shown.statistics == gate.statistics()
        assert len(shown.leases) == len(held)
        in_use = shown.statistics
        assert sum(lease.slots for lease in shown.leases) == in_use.slots_in_use
        assert sum(lease.bytes for lease in shown.leases) == in_use.bytes_in_use
    for lease in [*held, foreign]:
        lease.release()
    assert [gate.leases for gate in snapshot(gate, other).gates] == [(), ()]


@pytest.mark.anyio
async def test_snapshot_shows_no_waiter_as_lease():
    """Who stands in line holds nothing; who was granted and has not run does."""
    gate = Gate(slots=1)
    first = await gate.admit()

    async def second():
        with await gate.admit():
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(second)
        await anyio.wait_all_tasks_blocked()
        (shown,) = snapshot(gate).gates
        assert (len(shown.leases), shown.statistics.waiting) == (1, 1)
        first.release()
        (shown,) = snapshot(gate).gates
        assert (len(shown.leases), shown.statistics.waiting) == (1, 0)
    assert snapshot(gate).gates[0].leases == ()


def test_knows_age_where_the_books_need_it():
    """Under a fair order the age of a lease is exact."""
    clock = Clock()
    gate = Gate(slots=9, order="fair", clock=clock)
    old = gate.try_admit()
    gc.collect()  # the collector now comes to it last
    clock.now += 5
    new = gate.try_admit()
    clock.now += 2
    assert [lease.age_s for lease in snapshot(gate).gates[0].leases] == [7, 2]
    old.release()
    new.release()


@pytest.mark.anyio
async def test_learns_age_from_earlier_snapshot(monkeypatch):
    """Under FIFO no clock was read: a lease is as old as snapshots have seen it."""
    clock = Clock()
    monkeypatch.setattr(inspect.anyio, "current_time", clock)
    gate = Gate(slots=9)
    old = await gate.admit(slots=3)
    shots = [snapshot(gate)]
    for _ in range(2):
        clock.now += 5
        shots.append(snapshot(gate, previous=shots[-1]))
    new = await gate.admit()
    shots.append(snapshot(gate, previous=shots[-1]))
    ages = [[lease.age_s for lease in shot.gates[0].leases] for shot in shots]
    assert ages == [[None], [5], [10], [10, None]]
    old.release()
    again = await gate.admit(slots=3)  # the same address, as like as not
    del old
    clock.now += 1
    (shown,) = snapshot(gate, previous=shots[-1]).gates
    assert [(lease.slots, lease.age_s) for lease in shown.leases] == [(1, 1), (3, None)]
    again.release()
    new.release()


def test_snapshot_keeps_no_lease_alive(no_collector, monkeypatch):
    """A lease that is lost after a snapshot is noticed at once."""
    monkeypatch.setattr(inspect.anyio, "current_time", Clock())
    gate = Gate(slots=1)
    lease = gate.try_admit()
    shown = snapshot(gate)
    with pytest.warns(ResourceWarning, match="never released"):
        del lease
    assert gate.statistics().lost == 1
    assert snapshot(gate, previous=shown).gates[0].leases == ()


@pytest.mark.anyio
async def test_tells_where_lease_was_granted():
    """Under tracemalloc a lease shows the line that asked for it."""
    gate = Gate(slots=9)
    untraced = await gate.admit()
    tracemalloc.start(1)
    try:
        shallow = await gate.admit()
        tracemalloc.stop()
        tracemalloc.start(10)
        line = sys._getframe().f_lineno + 1
        lease = await gate.admit(slots=3)
        (shown,) = snapshot(gate).gates
    finally:
        tracemalloc.stop()
    places = {each.slots: each.granted_at for each in shown.leases}
    assert places == {1: None, 3: f"{__file__}:{line}"}
    for each in (untraced, shallow, lease):
        each.release()


@pytest.mark.anyio
async def test_shows_sessions_in_every_phase():
    """Each session is shown with how far it got, and what it still holds."""
    go_on, end_now = anyio.Event(), anyio.Event()

    async def ended(_):
        await end_now.wait()

    async def slow():
        await go_on.wait()

    async with SessionRegistry() as sessions, anyio.create_task_group() as group:
        idle = sessions.open("idle")
        idle.box(bytes(10), nbytes=10)
        idle.box(bytes(5), nbytes=5).take()
        starting, started = sessions.open("starting"), sessions.open("started")
        closing = sessions.open("closing")
        group.start_soon(starting.start, slow)
        await started.start(anyio.lowlevel.checkpoint, end=ended)
        await closing.start(anyio.lowlevel.checkpoint, end=ended)
        closing.box(bytes(3), nbytes=3)
        closing.close("client_gone")
        await anyio.wait_all_tasks_blocked()
        (shown,) = snapshot(sessions).registries
        phases = [(s.id, s.phase, s.outcome, s.payload_bytes) for s in shown.sessions]
        assert phases == [
            ("idle", "open", None, 10),
            ("starting", "starting", None, 0),
            ("started", "started", None, 0),
            ("closing", "closing", "client_gone", 0),
        ]
        assert [s.generation for s in shown.sessions] == [1, 2, 3, 4]
        assert all(s.age_s >= 0 for s in shown.sessions)
        assert shown.sessions[0].age_s >= shown.sessions[-1].age_s
        counters = shown.statistics
        assert counters == sessions.statistics()
        assert counters.live == sum(s.outcome is None for s in shown.sessions)
        assert counters.closing == sum(s.outcome is not None for s in shown.sessions)
        assert counters.payloads == sum(s.payloads for s in shown.sessions)
        assert counters.payload_bytes == sum(s.payload_bytes for s in shown.sessions)
        go_on.set()
        end_now.set()
        await anyio.wait_all_tasks_blocked()
        sessions.close_all()
    assert snapshot(sessions).registries[0].sessions == ()


def test_works_on_gate_without_event_loop():
    """Outside of a loop there is no clock: ages are unknown, the rest is there."""
    gate = Gate(slots=2, order="fair", clock=Clock())
    plain = Gate(slots=2)
    leases = [gate.try_admit(), plain.try_admit()]
    first = snapshot(gate, plain)
    fair, fifo = snapshot(gate, plain, previous=first).gates
    assert (fair.leases[0].age_s, fifo.leases[0].age_s) == (0, None)
    for lease in leases:
        lease.release()


def test_shows_no_age_by_a_clock_that_is_gone():
    """A registry whose loop has ended shows its sessions without an age."""

    async def main():
        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            assert session.phase == "open"
            return snapshot(sessions)

    for backend in ("asyncio", "trio"):
        (session,) = anyio.run(main, backend=backend).registries[0].sessions
        assert session.age_s is not None
    assert inspect._read(anyio.current_time) is None


@pytest.mark.anyio
async def test_snapshot_reads_as_a_list():
    """As text a snapshot is a line for each gate, lease, registry and session."""
    clock = Clock()
    gate = Gate(slots=2, order="fair", clock=clock, name="pictures")
    async with SessionRegistry() as sessions:
        lease = gate.try_admit(bytes=400)
        clock.now += 1.5
        session = sessions.open("a")
        session.box(b"secret", nbytes=6)
        lines = str(snapshot(gate, sessions)).splitlines()
    lease.release()
    assert lines[:3] == [
        "gate pictures: 1 of 2 slots, 400 of unbounded bytes, 0 waiting",
        "  lease of 1 slots, 400 bytes, 1.5 s old",
        "registry: 1 live, 0 closing, 6 bytes in 1 payloads",
    ]
    assert lines[3].startswith("  session a#1 open, 0.")
    assert lines[3].endswith(" s old, 6 bytes in 1 payloads")


def test_snapshot_turns_into_json():
    """A debug endpoint can send it as it is."""
    gate = Gate(slots=2)
    lease = gate.try_admit()
    shown = snapshot(gate)
    sent = json.loads(json.dumps(dataclasses.asdict(shown)))
    lease.release()
    assert sent["gates"][0]["statistics"]["slots_in_use"] == 1
    assert sent["gates"][0]["leases"] == [
        {"slots": 1, "bytes": 0, "age_s": None, "granted_at": None}
    ]
    assert snapshot(gate, previous=dataclasses.replace(shown)).gates[0].leases == ()


def test_snapshot_of_nothing_is_empty():
    """Nobody asked for is nobody shown."""
    assert snapshot() == Snapshot(gates=(), registries=())
    assert str(snapshot()) == ""
