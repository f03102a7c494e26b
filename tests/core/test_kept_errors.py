"""An error that is kept keeps no payload: not in locals, closures or defaults."""

import gc
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Gate, Payload, SessionRegistry, Stream, managed, scrub

pytestmark = pytest.mark.anyio


class Pixels:
    """Stands for a decoded picture."""


def no(*_: object) -> None:
    raise ValueError("the engine says no")


def open_by_closure(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def open_() -> object:
        await checkpoint()
        return no(pixels)

    return open_


def open_by_default(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def open_(pixels: Pixels = pixels) -> object:
        await checkpoint()
        return no()

    return open_


def open_by_keyword_default(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def open_(*, pixels: Pixels = pixels) -> object:
        return no()

    return open_


def open_by_inner_function(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    def decode() -> None:
        no(pixels)

    async def open_() -> object:
        return decode()

    return open_


def open_by_cause(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def open_() -> object:
        try:
            return no(pixels)
        except ValueError as error:
            raise ExceptionGroup("both", [error, OSError(3)]) from error

    return open_


def open_by_attribute(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def open_() -> object:
        return pixels.no_such_name  # type: ignore[attr-defined]

    return open_


def open_by_argument(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def send(_pixels: Pixels) -> object:
        return no()

    return partial(send, pixels)


def open_by_callable(pixels: Pixels) -> Callable[[], Awaitable[object]]:
    async def send(_pixels: Pixels) -> object:
        return no()

    return lambda: send(pixels)


def open_by_coroutine_that_was_called(pixels: Pixels) -> Any:
    def open_() -> None:
        """Return nothing that can be awaited."""
        assert pixels

    return open_


OPENS = [
    open_by_closure,
    open_by_default,
    open_by_keyword_default,
    open_by_inner_function,
    open_by_cause,
    open_by_attribute,
    open_by_argument,
    open_by_callable,
    open_by_coroutine_that_was_called,
]


def end_by_closure(pixels: Pixels) -> Callable[[object], object]:
    return lambda _stream: pixels


def end_by_default(pixels: Pixels) -> Callable[[object], object]:
    async def end(_stream: object, pixels: Pixels = pixels) -> None: ...

    return end


async def fail() -> object:
    await checkpoint()
    return no()


async def one() -> AsyncIterator[int]:
    yield 1


async def kept_error(act: Callable[[], Awaitable[object]]) -> Exception:
    """Return the error that *act* raises, and nothing else of it."""
    try:
        await act()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")


def watched() -> tuple[Pixels, weakref.ref[Pixels]]:
    pixels = Pixels()
    return pixels, weakref.ref(pixels)


async def open_and_start(sessions: SessionRegistry, pairs: list[Any]) -> None:
    with sessions.open("a") as session:
        starting = session.start_all(pairs[:])
        pairs.clear()
        await starting


@pytest.mark.parametrize("make", OPENS)
@pytest.mark.parametrize("several", [False, True])
async def test_frees_what_open_refers_to_when_its_error_is_kept(
    make: Callable[[Pixels], Any], several: bool, no_collector: None
) -> None:
    """The payload of a start that failed is dead while its error is kept."""
    pixels, ref = watched()
    async with SessionRegistry() as sessions:
        pairs = [(make(pixels), None)]
        if several:
            pairs.insert(0, (fail, end_by_default(pixels)))
        del pixels
        error = await kept_error(partial(open_and_start, sessions, pairs))
        while sessions.statistics().closing:  # the other one may have to settle yet
            await checkpoint()
        assert ref() is None
        assert error.__traceback__ is not None
        assert not gc.isenabled()


@pytest.mark.parametrize("make", [end_by_closure, end_by_default])
async def test_frees_what_end_refers_to_when_the_error_is_kept(
    make: Callable[[Pixels], Any], no_collector: None
) -> None:
    """The payload that an END closes over is dead when its start has failed."""
    pixels, ref = watched()
    async with SessionRegistry() as sessions:
        pairs = [(fail, make(pixels))]
        del pixels
        error = await kept_error(partial(open_and_start, sessions, pairs))
        assert ref() is None
        assert str(error) == "the engine says no"


def managed_by_closure(pixels: Pixels) -> Callable[..., Stream[int]]:
    @managed(gate=Gate(slots=1))
    async def answer() -> AsyncIterator[int]:
        await checkpoint()
        no(pixels)
        return one()

    return answer


def managed_by_default(pixels: Pixels) -> Callable[..., Stream[int]]:
    @managed(gate=Gate(slots=1))
    async def answer(pixels: Pixels = pixels) -> AsyncIterator[int]:
        no()
        return one()

    return answer


def managed_generator(pixels: Pixels) -> Callable[..., Stream[int]]:
    @managed(gate=Gate(slots=1))
    async def answer(pixels: Pixels = pixels) -> AsyncIterator[int]:
        await checkpoint()
        no(pixels)
        yield 1

    return answer


def managed_that_returns_no_stream(pixels: Pixels) -> Callable[..., Any]:
    @managed(gate=Gate(slots=1))
    async def answer() -> Any:
        return type(pixels)

    return answer


def scrubbed_by_closure(pixels: Pixels) -> Callable[..., Any]:
    @scrub()
    async def answer() -> AsyncIterator[int]:
        await checkpoint()
        no(pixels)
        yield 1

    return answer


def scrubbed_by_default(pixels: Pixels) -> Callable[..., Any]:
    @scrub()
    async def answer(pixels: Pixels = pixels) -> AsyncIterator[int]:
        no()
        yield 1

    return answer


def scrubbed_box(pixels: Pixels) -> Callable[..., Any]:
    @scrub("picture")
    async def answer(picture: Any = pixels) -> AsyncIterator[int]:
        no(picture.take())
        yield 1

    return answer


@pytest.mark.parametrize(
    "make",
    [
        managed_by_closure,
        managed_by_default,
        managed_generator,
        managed_that_returns_no_stream,
        scrubbed_by_closure,
        scrubbed_by_default,
        scrubbed_box,
    ],
)
async def test_frees_what_a_decorated_function_refers_to(
    make: Callable[[Pixels], Callable[[], Any]], no_collector: None
) -> None:
    """Its closure and defaults are dead while the error and the stream are kept."""
    pixels, ref = watched()
    stream = make(pixels)()
    del pixels
    error = await kept_error(stream.__anext__)
    assert ref() is None
    assert error.__traceback__ is not None
    await stream.aclose()


async def test_shows_where_an_error_was_raised() -> None:
    """A kept traceback has all files, names and lines, and no variables."""
    async with SessionRegistry() as sessions:
        pairs = [(open_by_inner_function(Pixels()), None)]
        error = await kept_error(partial(open_and_start, sessions, pairs))
    shown = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in shown][-3:] == ["open_", "decode", "no"]
    assert all(frame.filename == __file__ for frame in shown[-3:])
    assert shown[-1].line == 'raise ValueError("the engine says no")'
    assert [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)][
        -3:
    ] == [{}, {}, {}]


def test_raises_on_with_what_is_left(no_collector: None) -> None:
    """An error whose frames were cleared is raised on through the one that runs."""
    pixels, ref = watched()

    def step(pixels: Pixels = pixels) -> None:
        no(pixels)

    def run(step: Callable[[], None]) -> None:
        try:
            step()
        except ValueError as error:
            Payload.forget(error)
            raise

    with pytest.raises(ValueError, match="says no") as caught:
        run(step)
    del pixels, step
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["run", "step", "no"]
    Payload.forget(caught.value)
    assert ref() is None


@pytest.mark.parametrize("way", ["managed", "scrub", "scrubbed call", "starts"])
async def test_leaves_an_error_alone_that_the_caller_is_handling(way: str) -> None:
    """Where a fallback fails, too, the frames of the first error stay whole."""

    def fails() -> None:
        secret = "seen by a debugger"
        raise KeyError(secret[:4])

    @managed(gate=Gate(slots=1))
    async def fallback() -> AsyncIterator[int]:
        raise ValueError
        yield 0

    @scrub("picture")
    async def scrubbed(picture: object) -> AsyncIterator[int]:
        raise ValueError
        yield 0

    try:
        fails()
    except KeyError as first:
        if way == "managed":
            with pytest.raises(ValueError, match="^$"):
                async with fallback() as stream:
                    await anext(stream)
        elif way == "scrub":
            with pytest.raises(ValueError, match="^$"):
                await anext(scrubbed(Pixels()))
        elif way == "starts":
            async with SessionRegistry() as sessions:
                with sessions.open("a") as session, pytest.raises(TypeError):
                    await session.start_all(None)  # type: ignore[arg-type]
        else:
            with pytest.raises(TypeError):
                scrubbed()  # type: ignore[call-arg]
        kept = first.__traceback__
    assert kept is not None
    assert kept.tb_next is not None
    assert "secret" in kept.tb_next.tb_frame.f_locals
