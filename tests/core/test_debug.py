"""`who_holds`: what it tells, what it costs, and what it leaves behind."""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import gc
import sys
import types
import weakref

import anyio
import anyio.lowlevel
import pytest

from lifecycle import SessionRegistry, debug
from lifecycle.debug import Holder, who_holds

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


def test_knows_task_however_deep_it_awaits(passes):
    """A task owns what it is suspended in, through coroutines and generators."""

    async def deep(depth, hand):
        if depth:
            async for _ in through(depth - 1, hand):
                pass
        else:
            image = hand.pop()
            await leave.wait()
            del image

    async def through(depth, hand):
        await deep(depth, hand)
        yield

    async def main():
        image = Big()
        async with anyio.create_task_group() as group:
            group.start_soon(deep, 10, [image], name="diver")
            await anyio.wait_all_tasks_blocked()
            passes.clear()
            holders = who_holds(image)
            leave.set()
        return holders

    for backend in ("asyncio", "trio"):
        leave = anyio.Event()
        (holder,) = anyio.run(main, backend=backend)
        assert (holder.name, holder.task) == ("image", "diver")
        assert passes == [1]  # no looking around for the task


def test_puts_nearest_first():
    """Holders of the object itself come before holders of its holders."""
    image = Big()
    far, near = keep([[image]]), keep(image)
    assert [len(holder.path) for holder in who_holds(image)] == [0, 2]
    far.close()
    near.close()


def test_names_a_place_once():
    """A task that leads to the object in two ways is one line, the shortest."""

    async def main():
        image = Big()
        task = asyncio.create_task(asyncio.sleep(60), name="waits")
        for number in range(2):
            task.add_done_callback(functools.partial(lambda *_: None, number, image))
        places = [(found.where, found.name) for found in who_holds(image)]
        task.cancel()
        return places

    assert asyncio.run(main()).count(("task", "result or callback")) == 1


@pytest.mark.usefixtures("whole_heap")
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


def test_ignores_its_caller():
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
    """A list of the caller's own has a holder that cannot be named."""
    image = Big()
    mine = [image]
    assert unknown(who_holds(image)) == {"what runs, C or a cycle"}
    assert who_holds(image)[0].path == ("list",)
    mine.clear()
    assert who_holds(image) == []


def test_names_no_task_for_a_cycle(no_collector):
    """What only the collector will free is listed, without a task."""
    image = Big()
    ring = [image]
    ring.append(ring)
    del ring
    assert unknown(who_holds(image)) == {"what runs, C or a cycle"}
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
    monkeypatch.setattr(gc, "get_referrers", counting)
    return widths


def test_bounds_work_for_objects_with_thousands_of_holders(passes):
    """Of thousands of holders as many are followed as can be; the work is bounded."""
    image = Big()
    crowd = [[[image]] for _ in range(2000)]
    assert unknown(who_holds(image)) == {"what runs, C or a cycle"}
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
    """A ``del`` in the frame still frees the payload after a look at it."""

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
        gone, changed = 1, 2
        mine = locals()
        had = dict(mine)
        later, changed = image, 3
        del gone
        await wait()
        assert mine == had
        assert (later, changed) == (image, 3)
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
    nested = {"outer": ("inner", ("most", image))}
    for _ in range(4):  # one level after another
        gc.collect()
    assert not any(map(gc.is_tracked, (nested, nested["outer"], nested["outer"][1])))
    coroutine = keep(nested)
    del nested
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


@pytest.mark.usefixtures("whole_heap")
def test_finds_attribute_of_extension_module():
    """`sys.last_exc` and its like are globals of a module without builtins."""
    image = Big()
    sys.last_holder_test = image  # type: ignore[attr-defined]
    assert str(who_holds(image)[0]) == "module sys: last_holder_test"
    del sys.last_holder_test  # type: ignore[attr-defined]


def test_follows_generator_to_task_through_containers():
    """A generator that is not awaited belongs to the task that keeps it."""

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


def test_looks_for_no_task_in_a_circle():
    """Generators that hold each other, and that do not run, have no task."""

    def source(kept, others):
        yield

    image = Big()
    hands: list[list[object]] = [[], []]
    pair = [source(image, hands[0]), source(None, hands[1])]
    for generator, hand in zip(pair, reversed(hands), strict=True):
        next(generator)
        hand.append(generator)
    (holder,) = who_holds(image)
    assert (holder.name, holder.task) == ("kept", None)
    for generator, hand in zip(pair, hands, strict=True):
        hand.clear()
        generator.close()


@pytest.mark.anyio
async def test_finds_payload_that_session_still_boxes(no_collector):
    """A box that was not emptied is the session's, until the session closes."""
    image = Big()
    entered, leave = anyio.Event(), anyio.Event()

    async def handler(sessions, hand):
        with sessions.open("a") as session:
            session.box(hand.pop())
            entered.set()
            await leave.wait()

    async with SessionRegistry() as sessions, anyio.create_task_group() as group:
        group.start_soon(handler, sessions, [image], name="handler")
        await entered.wait()
        found = [h for h in who_holds(image) if h.name == "session"]
        leave.set()
    (holder,) = found
    assert holder.task == "handler"
    assert (holder.path[0], holder.path[-1]) == ("Payload", "Session")
    witness = weakref.ref(image)
    del image
    assert witness() is None


def test_names_nothing_that_has_ended():
    """A coroutine that another thread finishes meanwhile is not described wrongly."""
    image = Big()
    coroutine = keep(image)
    coroutine.close()
    assert debug._place(debug._ReferencePath([coroutine, image])) == ("unknown", "")


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
