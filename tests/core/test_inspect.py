"""What `who_holds` leaves behind, what it costs, and what `snapshot` shows."""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import gc
import json
import random
import sys
import tracemalloc
import types
import weakref

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Gate, Lease, SessionRegistry, _holders, _referrers, inspect
from lifecycle.inspect import Holder, Snapshot, snapshot, who_holds

MODULE_LEVEL: list[object] = []


class Big:
    """A payload that can be watched dying."""

    __slots__ = ("__weakref__", "content")


def suspended(coroutine):
    """Run *coroutine* until it waits."""
    coroutine.send(None)
    return coroutine


@types.coroutine
def wait():
    """Suspend, whatever runs the coroutine."""
    yield


def keep(obj):
    """Return a suspended coroutine that holds *obj* in its local ``kept``."""

    async def keeper(kept):
        await wait()

    return suspended(keeper(obj))


# What it tells.


def test_reads_like_a_sentence():
    """A holder as text has the place, the name, the task and the way."""
    holder = Holder(where="chat:7", name="form", task="req-1", path=("list", "Form"))
    assert str(holder) == "chat:7: form [task req-1] through list in Form"
    bare = Holder(where="chat:7", name="value stack", task=None, path=())
    assert str(bare) == "chat:7: value stack"


def test_works_without_event_loop():
    """Coroutines that no loop drives are found as well, without a task."""
    image = Big()
    line = test_works_without_event_loop.__code__.co_firstlineno
    coroutine = keep(image)
    (holder,) = who_holds(image)
    assert holder == Holder(where=holder.where, name="kept", task=None, path=())
    assert holder.where.startswith("keep.<locals>.keeper:")
    assert 0 < int(holder.where.rpartition(":")[2]) < line
    coroutine.close()


def test_puts_nearest_first():
    """Whoever holds the object itself comes before who holds its holder."""
    image = Big()
    far, near = keep([[image]]), keep(image)
    assert [len(holder.path) for holder in who_holds(image)] == [0, 2]
    far.close()
    near.close()


def test_shows_no_content():
    """Law 12: keys and values of containers are not part of an answer."""
    image = Big()
    MODULE_LEVEL.append({"a secret prompt": {"another": image}})
    coroutine = keep({"a secret prompt": image})
    text = " ".join([*map(str, who_holds(image)), *map(repr, who_holds(image))])
    assert "MODULE_LEVEL" in text
    assert "secret" not in text
    MODULE_LEVEL.clear()
    coroutine.close()


def test_ignores_who_asks():
    """The variables of the caller, and of its callers, are not holders."""
    image = Big()

    async def asks(mine):
        async def deeper(also):
            return who_holds(also)

        return await deeper(mine)

    with pytest.raises(StopIteration) as stop:
        asks(image).send(None)
    assert stop.value.value == []


# Where it cannot tell a name.


def unknown(holders):
    """Return why each way ends, after checking that none has a name."""
    assert {holder.where for holder in holders} == {"unknown"}
    return {holder.name for holder in holders}


def test_admits_what_runs():
    """A list of the caller's own is held by somebody who cannot be named."""
    image = Big()
    mine = [image]
    assert unknown(who_holds(image)) == {"a frame that runs, or C"}
    assert who_holds(image)[0].path == ("list",)
    mine.clear()
    assert who_holds(image) == []


def test_tells_cycle_from_leak(no_collector):
    """What only the collector will free is not blamed on anybody."""
    image = Big()
    ring = [image]
    ring.append(ring)
    del ring
    assert unknown(who_holds(image)) == {"a cycle that waits for the collector"}
    gc.collect()
    assert who_holds(image) == []


def test_stops_after_hops():
    """The way ends at the limit, which is said; with more hops it goes on."""
    image = Big()
    coroutine = keep([[[image]]])
    (holder,) = who_holds(image, hops=2)
    assert unknown([holder]) == {"more than 2 hops away"}
    assert holder.path == ("list", "list")
    assert who_holds(image, hops=4)[0].name == "kept"
    coroutine.close()


@pytest.fixture
def passes(monkeypatch):
    """Count the passes over the heap: for how many objects each was made."""
    widths: list[int] = []

    def counting(*objects):
        widths.append(len(objects))
        # CPython 3.13 packs the arguments anew, and finds this tuple then.
        return [each for each in real(*objects) if each is not objects]

    real = gc.get_referrers
    monkeypatch.setattr(_referrers.gc, "get_referrers", counting)
    return widths


def test_bounds_work_for_what_everybody_holds(passes):
    """Of thousands of holders as many are followed as can be; the work is bounded."""
    image = Big()
    crowd = [[[image]] for _ in range(2000)]
    assert "more than can be followed" in unknown(who_holds(image))
    assert len(passes) <= 6
    assert max(passes) <= 256
    crowd.clear()


def test_walks_large_heap_once_a_hop(passes):
    """Half a million more objects do not mean more passes over the heap."""
    image = Big()
    coroutine = keep({"image": image})
    ballast = [[number] for number in range(500_000)]
    (holder,) = who_holds(image)
    assert (holder.name, holder.path) == ("kept", ("dict",))
    # Two hops to the frame; and one that looks for a task, as the frame has none.
    assert passes == [1, 1, 1]
    ballast.clear()
    coroutine.close()


# What it leaves behind.


def test_holds_nothing_itself(no_collector):
    """The answer is made of words, and the object dies by its last reference."""
    image = Big()
    coroutine = keep([image])
    holders = who_holds(image)
    words = [value for holder in holders for value in dataclasses.astuple(holder)]
    assert {type(word) for word in words} <= {str, tuple, type(None)}
    coroutine.close()
    witness = weakref.ref(image)
    del image
    assert witness() is None
    assert holders


def test_leaves_no_snapshot_in_frame(no_collector):
    """A ``del`` in the frame still frees the payload after somebody looked."""

    async def handler(image):
        await wait()
        del image
        await wait()

    image = Big()
    coroutine = suspended(handler(image))
    assert who_holds(image)[0].name == "image"
    witness = weakref.ref(image)
    del image
    coroutine.send(None)
    assert witness() is None
    coroutine.close()


def test_leaves_locals_of_others_alone():
    """A frame's own ``locals()`` has what it had, neither more nor less."""

    async def handler(image):
        mine = locals()
        had = dict(mine)
        later = image
        await wait()
        assert mine == had
        assert later
        await wait()

    image = Big()
    coroutine = suspended(handler(image))
    assert who_holds(image)[0].name == "image, later"
    coroutine.send(None)
    coroutine.close()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="frames keep no snapshot")
def test_names_snapshot_of_locals():
    """Up to CPython 3.12 a tool that has read ``f_locals`` makes a holder."""

    async def handler(image):
        await wait()
        del image
        await wait()

    image = Big()
    coroutine = suspended(handler(image))
    assert coroutine.cr_frame.f_locals["image"] is image
    coroutine.send(None)
    for _ in range(2):
        (holder,) = who_holds(image)
        assert (holder.name, holder.path) == ("snapshot of its locals", ("dict",))
    coroutine.close()


def test_leaves_namespace_of_top_level_code_alone():
    """Code with a top-level ``await`` has its real variables in that dict."""
    image = Big()
    code = compile(
        "await wait()",
        "console",
        "exec",
        flags=0x2000,  # PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    names = {"wait": wait, "image": image}
    coroutine = suspended(eval(code, {}, names))
    holders = who_holds(image)
    assert [holder.path for holder in holders] == [("dict",)]
    assert names == {"wait": wait, "image": image}
    # As a local of this very frame it is not a snapshot of anything.
    values = keep(names["wait"])
    assert _holders._locals(coroutine, coroutine.cr_frame) == names
    assert names == {"wait": wait, "image": image}
    values.close()
    coroutine.close()


def test_survives_free_list_of_asyncio():
    """gh-122695: looking does not revive dead futures, which hung the collector."""

    async def use_futures():
        loop = asyncio.get_running_loop()

        async def use():
            done = loop.create_future()
            loop.call_soon(done.set_result, None)
            await done

        await asyncio.gather(use(), use(), use())
        image = bytes(4096)  # not tracked: all that is tracked is asked about it
        assert who_holds(image) == []
        assert who_holds(image) == []

    asyncio.run(use_futures())
    gc.collect()


# Ways that no table of retentions has.


def test_finds_bytes_in_nested_tuples(no_collector):
    """Containers of atoms, which the collector forgets, are found all the same."""
    image = bytes(4096)
    coroutine = keep({"outer": ("inner", ("most", image))})
    gc.collect()
    (holder,) = who_holds(image)
    assert (holder.name, holder.path) == ("kept", ("tuple", "tuple", "dict"))
    coroutine.close()


def test_finds_variable_behind_container():
    """A context variable is named though the payload is within its value."""
    image = Big()
    variable: contextvars.ContextVar[object] = contextvars.ContextVar("variable")
    context = contextvars.Context()
    context.run(variable.set, [image])
    (holder,) = who_holds(image)
    assert (holder.where, holder.name) == ("context", "variable")
    assert holder.path == ("list",)
    del context


def test_stops_at_class():
    """A class is a place, also where it holds something other than attributes."""

    class Base:
        pass

    class Derived(Base):
        pass

    names = {(holder.where, holder.name) for holder in who_holds(Base)}
    assert (f"class {__name__}.{Derived.__qualname__}", "itself") in names


def test_names_module_without_import():
    """A namespace that code was executed in is a module, whatever it is called."""
    image = Big()
    namespace = {"__name__": "scratch", "image": image}
    exec("def use(): return image", namespace)
    assert who_holds(image)[0] == Holder(
        where="module scratch", name="image", task=None, path=()
    )
    namespace.clear()


def test_finds_attribute_of_extension_module():
    """`sys.last_exc` and its like are globals of a module without builtins."""
    image = Big()
    sys.last_holder_test = image  # type: ignore[attr-defined]
    assert str(who_holds(image)[0]) == "module sys: last_holder_test"
    del sys.last_holder_test  # type: ignore[attr-defined]


def test_follows_generator_to_task_through_containers():
    """A generator that nobody awaits belongs to the task that keeps it."""

    async def source(image):
        yield 1

    async def handler(items):
        async with contextlib.aclosing(items[0]):
            await items[0].__anext__()
            await release.wait()

    async def main():
        image = Big()
        async with anyio.create_task_group() as group:
            group.start_soon(handler, [source(image)], name="reader")
            await anyio.wait_all_tasks_blocked()
            holders = who_holds(image)
            release.set()
        return holders

    for backend in ("asyncio", "trio"):
        release = anyio.Event()
        (holder,) = anyio.run(main, backend=backend)
        assert (holder.name, holder.task) == ("image", "reader")


def test_names_nothing_that_has_ended():
    """A coroutine that another thread finishes meanwhile is not described wrongly."""
    image = Big()
    coroutine = keep(image)
    coroutine.close()
    assert _holders._place(coroutine, image) == (
        "keep.<locals>.keeper",
        "resumed meanwhile",
    )


def test_names_callback_of_task():
    """A callback that a task still owes is the task's; on CPython 3.11 too."""

    async def main(image):
        task = asyncio.create_task(asyncio.sleep(3600), name="sleeper")
        callback = functools.partial(print, image)
        task.add_done_callback(callback)
        await asyncio.sleep(0)
        holders = who_holds(image)
        task.remove_done_callback(callback)
        task.cancel()
        return holders

    assert [str(holder) for holder in asyncio.run(main(Big()))] == [
        "task: result or callback [task sleeper] through tuple in partial"
    ]


# Snapshots.


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


def test_snapshot_keeps_no_lease_alive(no_collector):
    """A lease that is lost after a snapshot is noticed at once."""
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
            sessions.open("a")
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
        sessions.open("a").box(b"secret", nbytes=6)
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
