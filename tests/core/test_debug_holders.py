"""Every way in which a payload is known to be retained, found and named."""

import asyncio
import contextlib
import contextvars
import functools
import logging.handlers
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from lifecycle.debug import who_holds

pytestmark = pytest.mark.anyio

CACHE: dict[str, object] = {}
VARIABLE: contextvars.ContextVar[object] = contextvars.ContextVar("VARIABLE")


class Big:
    """A payload that can be watched dying."""

    __slots__ = ("__weakref__", "content")


class Ward:
    """Something with an attribute."""

    payload: object


@dataclass
class Stage:
    """Lets a test look while a case holds its payload."""

    held: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event = field(default_factory=anyio.Event)

    async def wait(self) -> None:
        """Suspend the case, holding what it holds."""
        self.held.set()
        await self.release.wait()


@dataclass
class Case:
    """One way to hold a payload, and how it is to be called."""

    hold: Callable[[list[Any], Stage], Any]
    name: str
    path: tuple[str, ...]
    where: str
    backend: str | None
    task: str | None


CASES: list[Case] = []


def case(
    name: str,
    *path: str,
    where: str = "",
    backend: str | None = None,
    task: str | None = "holder",
) -> Callable[[Any], Any]:
    """Enter a case; *where* is the place but for its line."""

    def enter(hold: Any) -> Any:
        place = where or f"{hold.__name__}.<locals>.work"
        CASES.append(Case(hold, name, path, place, backend, task))
        return hold

    return enter


# A case takes the payload out of a list that the test gave to it.


@case("image")
async def parameter_of_generator(hand, stage):
    async def work(image):
        await stage.wait()
        yield 1

    async for _ in work(hand.pop()):
        pass


@case("image")
async def parameter_of_generator_at_a_yield(hand, stage):
    async def work(image):
        yield 1

    async for _ in work(hand.pop()):
        await stage.wait()


@case("image, alias")
async def second_local_alias(hand, stage):
    async def work(image):
        alias = image  # noqa: F841
        await stage.wait()

    await work(hand.pop())


@case("image")
async def local_of_caller(hand, stage):
    async def source():
        await stage.wait()
        yield 1

    async def work(image):
        async for _ in source():
            pass

    await work(hand.pop())


@case("chunk")
async def loop_variable(hand, stage):
    async def source():
        yield hand.pop()
        await stage.wait()

    async def work():
        async for chunk in source():  # noqa: B007
            pass

    await work()


@case("args", "tuple")
async def positional_arguments(hand, stage):
    async def work(*args):
        await stage.wait()

    await work(hand.pop())


@case("kwargs", "dict")
async def keyword_arguments(hand, stage):
    async def work(**kwargs):
        await stage.wait()

    await work(image=hand.pop())


@case("self", "Ward")
async def attribute(hand, stage):
    async def work(self):
        await stage.wait()

    ward = Ward()
    ward.payload = hand.pop()
    await work(ward)


@case("image", "cell")
async def cell_of_inner_function(hand, stage):
    async def work(image):
        def inner():
            return image

        del inner
        await stage.wait()

    await work(hand.pop())


@case("callback", "cell", "tuple", "function")
async def closure_of_callback(hand, stage):
    def make(image):
        return lambda: image

    async def work(callback):
        await stage.wait()

    await work(make(hand.pop()))


@case("callback", "tuple", "function")
async def default_of_function(hand, stage):
    async def work(callback):
        await stage.wait()

    await work(lambda image=hand.pop(): image)  # noqa: B008 - that is the case


@case("callback", "tuple", "partial")
async def partial(hand, stage):
    async def work(callback):
        await stage.wait()

    await work(functools.partial(print, hand.pop()))


@case("image")
async def generator_that_never_began(hand, stage):
    async def work(image):
        raise NotImplementedError
        yield

    waiting = work(hand.pop())
    await stage.wait()
    await waiting.aclose()


@case("image")
async def plain_generator(hand, stage):
    def work(image):
        yield 1

    items = work(hand.pop())
    next(items)
    await stage.wait()


@case("value stack")
async def value_stack(hand, stage):
    async def work():
        max(hand.pop(), await stage.wait(), key=id)

    await work()


@case("value stack", "tuple", "tuple_iterator")
async def iterator_of_loop(hand, stage):
    async def work():
        for each in (hand.pop(),):
            del each
            await stage.wait()

    await work()


@case(
    "handled exception",
    "frame of handled_exception.<locals>.fail",
    "traceback",
    "traceback",
    "KeyError",
)
async def handled_exception(hand, stage):
    def fail(image):
        raise KeyError

    async def work():
        try:
            fail(hand.pop())
        except KeyError:
            await stage.wait()

    await work()


@case(
    "error",
    "frame of context_of_exception.<locals>.fail",
    "traceback",
    "traceback",
    "KeyError",
    "ValueError",
)
async def context_of_exception(hand, stage):
    def fail(image):
        raise KeyError

    def replace():
        try:
            fail(hand.pop())
        except KeyError:
            raise ValueError from None

    async def work():
        errors = []
        try:
            replace()
        except ValueError as error:
            errors.append(error)
        (error,) = errors
        del errors
        error.__traceback__ = None
        await stage.wait()
        del error  # its context leads back to this frame

    await work()


@case("done", "tuple", "partial", "tuple", "list", "Future", backend="asyncio")
async def callback_of_future(hand, stage):
    async def work():
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(print)  # the first one has a field of its own
        done.add_done_callback(functools.partial(print, hand.pop()))
        await stage.wait()

    await work()


@case("done", "Future", backend="asyncio")
async def result_of_future(hand, stage):
    async def work():
        done = asyncio.get_running_loop().create_future()
        done.set_result(hand.pop())
        await stage.wait()

    await work()


@case("result or callback", where="task", task="done", backend="asyncio")
async def result_of_task(hand, stage):
    async def work():
        return hand.pop()

    task = asyncio.create_task(work(), name="done")
    await asyncio.wait([task])
    await stage.wait()


@case("scheduled call", "tuple", where="event loop", task=None, backend="asyncio")
async def scheduled_call(hand, stage):
    timer = asyncio.get_running_loop().call_later(3600, print, hand.pop())
    await stage.wait()
    timer.cancel()


@case("image")
async def argument_under_a_deadline(hand, stage):
    async def work(image):
        await stage.wait()

    with anyio.fail_after(60):
        await work(hand.pop())


@case("VARIABLE", where="context")
async def context_variable(hand, stage):
    token = VARIABLE.set(hand.pop())
    del token
    await stage.wait()


@case("VARIABLE", where="context", task="child")
async def copied_context(hand, stage):
    token = VARIABLE.set(hand.pop())
    async with anyio.create_task_group() as group:
        group.start_soon(stage.wait, name="child")
        VARIABLE.reset(token)
        del token
        # Nothing of this task holds it any more, but the copy is the child's.


@case("manager", "Manager")
async def context_manager(hand, stage):
    class Manager:
        def __init__(self, image):
            self.image = image

        async def __aenter__(self):
            return None

        async def __aexit__(self, *_exc):
            return None

    async def work(manager):
        async with manager:
            await stage.wait()

    await work(Manager(hand.pop()))


@case("image", where="asynccm_argument.<locals>.opened")
async def asynccm_argument(hand, stage):
    @contextlib.asynccontextmanager
    async def opened(image):
        yield

    async with opened(hand.pop()):
        await stage.wait()


@case("CACHE", "dict", where=f"module {__name__}", task=None)
async def module_global(hand, stage):
    CACHE["a prompt that must not be shown"] = hand.pop()
    await stage.wait()
    CACHE.clear()


@case("payload", "dict", where=f"class {__name__}.Ward", task=None)
async def class_attribute(hand, stage):
    Ward.payload = hand.pop()
    await stage.wait()
    del Ward.payload


@case("handler", "tuple", "LogRecord", "list", "MemoryHandler")
async def log_record(hand, stage):
    async def work(handler):
        record = logging.LogRecord("n", 10, "p", 1, "got %s", (hand.pop(), 1), None)
        handler.buffer.append(record)
        del record
        await stage.wait()
        handler.buffer.clear()

    handler = logging.handlers.MemoryHandler(100)
    try:
        await work(handler)
    finally:
        handler.close()


@case("inbox", "deque", "_MemoryObjectStreamState", "MemoryObjectReceiveStream")
async def queue(hand, stage):
    outbox, inbox = anyio.create_memory_object_stream[Any](1)
    outbox.send_nowait(hand.pop())
    outbox.close()
    del outbox

    async def work(inbox):
        await stage.wait()

    given = [inbox]
    del inbox
    with given[0]:
        await work(given[0])


PAYLOADS = {"object": Big, "bytes": lambda: bytes(4096)}


def ids(value: object) -> str | None:
    """Name a case by its function."""
    return value.hold.__name__ if isinstance(value, Case) else None


@pytest.mark.thorough
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("case", CASES, ids=ids)
async def test_names_holder_of_every_kind(
    case, payload, anyio_backend_name, no_collector, request
):
    """A retained payload is found by place, name, task and path; then it is gone.

    Looking changes nothing: in the end reference counts alone free the payload.
    """
    if case.backend not in {None, anyio_backend_name}:
        pytest.skip(f"only {case.backend} has it")
    if case.hold in {module_global, class_attribute}:
        request.getfixturevalue("whole_heap")
    stage = Stage()
    image = PAYLOADS[payload]()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(case.hold, [image], stage, name="holder")
            await stage.held.wait()
            holders = who_holds(image)
            stage.release.set()
    assert [
        holder
        for holder in holders
        if holder.where.partition(":")[0] == case.where
        and (holder.name, holder.path) == (case.name, case.path)
        and holder.task == case.task
    ], "\n".join(map(str, holders))
    assert who_holds(image) == []
    if payload == "object":
        witness = weakref.ref(image)
        del image
        assert witness() is None


class Incomparable:
    """Raises where it is compared, as arrays do."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


async def beside_others(given, stage) -> None:
    other, image = Incomparable(), given.pop()
    stage.held.set()
    await stage.release.wait()
    del other, image


async def test_compares_no_objects() -> None:
    """A holder has the payload itself, and not one that claims to equal it."""
    stage, image = Stage(), Big()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(beside_others, [image], stage, name="holder")
            await stage.held.wait()
            holders = who_holds(image)
            stage.release.set()
    assert "image" in {holder.name for holder in holders}
