"""`snapshot`: what gates and registries hold, and that it balances."""

import dataclasses
import json
import random
import re

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Gate, Lease, SessionRegistry, debug
from lifecycle.debug import Held, snapshot


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_snapshot_balances_with_statistics(order):
    """Law 1: at any moment what is in use is the sum of the leases shown."""
    gate = Gate(slots=40, bytes=4000, order=order, clock=Clock(), name="mine")
    other = Gate(slots=1, name="other")
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
        shown = snapshot(gate)
        in_use = gate.statistics()
        assert len(shown) == len(held)
        assert {(lease.what, lease.phase) for lease in shown} <= {("lease", "held")}
        assert sum(lease.slots for lease in shown) == in_use.slots_in_use
        assert sum(lease.bytes for lease in shown) == in_use.bytes_in_use
        assert [lease.name for lease in snapshot(gate, other)] == [
            *["mine"] * len(held),
            "other",
        ]
    for lease in [*held, foreign]:
        lease.release()
    assert snapshot(gate, other) == ()


@pytest.mark.anyio
async def test_snapshot_shows_no_waiter_as_lease():
    """A waiting request holds nothing; one that was granted and has not run does."""
    gate = Gate(slots=1)
    first = await gate.admit()

    async def second():
        with await gate.admit():
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(second)
        await anyio.wait_all_tasks_blocked()
        assert (len(snapshot(gate)), gate.statistics().waiting) == (1, 1)
        first.release()
        assert (len(snapshot(gate)), gate.statistics().waiting) == (1, 0)
    assert snapshot(gate) == ()


def test_knows_age_where_the_books_need_it():
    """Under a fair order the age of a lease is exact."""
    clock = Clock()
    gate = Gate(slots=9, order="fair", clock=clock)
    old = gate.try_admit()
    clock.now += 500
    new = gate.try_admit(slots=2)
    clock.now += 2
    assert {lease.slots: lease.age_s for lease in snapshot(gate)} == {1: 502, 2: 2}
    old.release()
    new.release()


@pytest.mark.anyio
async def test_learns_age_from_earlier_snapshot(monkeypatch):
    """Under FIFO no clock was read: a lease is as old as snapshots have seen it."""
    clock = Clock()
    monkeypatch.setattr(debug.anyio, "current_time", clock)
    gate = Gate(slots=9)
    old = await gate.admit(slots=3)
    ages = []

    def look():
        ages.append({lease.slots: lease.age_s for lease in snapshot(gate)})
        clock.now += 5

    look()
    look()
    new = await gate.admit()
    look()
    assert ages == [{3: None}, {3: 5}, {3: 10, 1: None}]
    old.release()
    again = await gate.admit(slots=3)  # the same address, as like as not
    del old
    look()
    assert ages[-1] == {1: 5, 3: None}
    again.release()
    new.release()


def test_snapshot_keeps_no_lease_alive(no_collector, monkeypatch):
    """A lease that is lost after a snapshot is noticed at once."""
    monkeypatch.setattr(debug.anyio, "current_time", Clock())
    gate = Gate(slots=1)
    lease = gate.try_admit()
    shown = snapshot(gate)
    with pytest.warns(ResourceWarning, match="never released"):
        del lease
    assert gate.statistics().lost == 1
    assert (len(shown), len(snapshot(gate))) == (1, 0)


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
        shown = snapshot(sessions)
        assert [(held.what, held.name, held.phase, held.bytes) for held in shown] == [
            ("session", "idle#1", "open", 0),
            ("payload", "idle#1", "open", 10),
            ("session", "starting#2", "starting", 0),
            ("session", "started#3", "started", 0),
            ("session", "closing#4", "client_gone", 0),
        ]
        assert all(held.age_s >= 0 for held in shown)
        assert shown[0].age_s >= shown[-1].age_s
        counters = sessions.statistics()
        kinds = [held.what for held in shown]
        assert kinds.count("session") == counters.live + counters.closing
        assert kinds.count("payload") == counters.payloads
        assert sum(held.bytes for held in shown) == counters.payload_bytes
        go_on.set()
        end_now.set()
        await anyio.wait_all_tasks_blocked()
        sessions.close_all()
    assert snapshot(sessions) == ()


def test_works_on_gate_without_event_loop():
    """Outside of a loop there is no clock: ages are unknown, the rest is there."""
    gate = Gate(slots=2, order="fair", clock=Clock())
    plain = Gate(slots=2)
    leases = [gate.try_admit(), plain.try_admit()]
    for _ in range(2):
        assert [lease.age_s for lease in snapshot(gate, plain)] == [0, None]
    for lease in leases:
        lease.release()


@pytest.mark.anyio
async def test_knows_the_age_of_a_session(monkeypatch):
    """However long ago it was opened."""
    async with SessionRegistry() as sessions:
        session = sessions.open("a")
        monkeypatch.setattr(session, "opened_at", 2.0)
        monkeypatch.setattr(sessions._state, "clock", lambda: 9.0)
        assert [held.age_s for held in snapshot(sessions)] == [7.0]
        monkeypatch.undo()
        session.close("completed")


@pytest.mark.anyio
async def test_shows_sessions_to_a_thread(anyio_backend_name):
    """Where the loop's clock cannot be read, a session is shown without an age."""
    async with SessionRegistry() as sessions:
        opened = sessions.open("a")
        assert opened.phase == "open"
        (session,) = await anyio.to_thread.run_sync(snapshot, sessions)
        assert session.name == "a#1"
        assert (session.age_s is None) == (anyio_backend_name == "trio")


@pytest.mark.anyio
async def test_snapshot_reads_as_a_list():
    """As text a snapshot is a line for each lease, session and payload."""
    clock = Clock()
    gate = Gate(slots=2, order="fair", clock=clock, name="pictures")
    async with SessionRegistry() as sessions:
        lease = gate.try_admit(bytes=400)
        clock.now += 1.5
        opened = sessions.open("a")
        opened.box(b"secret", nbytes=6)
        shown = str(snapshot(gate, sessions))
    lease.release()
    first, second, third = shown.splitlines()
    assert first == "pictures: lease, held, 1 slots, 400 bytes, 1.5 s old"
    assert re.fullmatch(r"a#1: session, open, \d+\.\d s old", second)
    assert re.fullmatch(r"a#1: payload, open, 6 bytes, \d+\.\d s old", third)


def test_snapshot_turns_into_json():
    """A debug endpoint can send it as it is."""
    gate = Gate(slots=2, name="pictures")
    lease = gate.try_admit()
    sent = json.loads(json.dumps([dataclasses.asdict(each) for each in snapshot(gate)]))
    lease.release()
    assert [Held(**each) for each in sent] == [
        Held(what="lease", name="pictures", phase="held", age_s=None, slots=1, bytes=0)
    ]


def test_snapshot_of_nothing_is_empty():
    """Without arguments nothing is shown."""
    assert snapshot() == ()
    assert str(snapshot()) == "nothing is held"
