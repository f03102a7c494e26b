"""scrub: generators that never hold their payload."""

import gc
import inspect
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Payload, scrub
from lifecycle.testing import Attempt, cancel_everywhere


class Tensor:
    """Something heavy that a weak reference can watch."""


def watched() -> tuple[Tensor, "weakref.ref[Tensor]"]:
    """Make a tensor, and what tells whether it is alive."""
    tensor = Tensor()
    return tensor, weakref.ref(tensor)


@scrub("image")
async def describe(
    image: Payload[Tensor], *, words: int = 3
) -> AsyncGenerator[str, None]:
    """Say what is in the image."""
    if words < 0:
        tensor = image.take()
        raise OSError(f"{type(tensor).__name__} refused")
    await checkpoint()
    if words:
        image.take()
    for i in range(words or 1):
        yield f"word {i}"
        await checkpoint()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_collector")
class TestScrub:
    async def test_holds_no_payload_while_it_streams(self) -> None:
        """A payload that was passed as a temporary is gone at the first item."""
        tensor, ref = watched()
        stream = describe([tensor].pop())
        del tensor
        assert ref() is not None
        assert await anext(stream) == "word 0"
        assert ref() is None
        assert [item async for item in stream] == ["word 1", "word 2"]

    async def test_clears_what_was_not_taken(self) -> None:
        """A payload that the body leaves in its box is gone at the first item too."""
        tensor, ref = watched()
        stream = describe(tensor, words=0)
        del tensor
        await anext(stream)
        assert ref() is None
        await stream.aclose()

    async def test_clears_a_box_that_the_caller_keeps(self) -> None:
        """A Payload is passed on as it is; keeping the box keeps nothing."""
        tensor, ref = watched()
        box = Payload(tensor, nbytes=7)
        stream = describe(box)
        del tensor
        await anext(stream)
        assert ref() is None
        assert box.taken
        await stream.aclose()

    async def test_holds_nothing_after_an_error(self) -> None:
        """The frames of an error that is kept have lost the payload."""
        tensor, ref = watched()
        stream = describe(image=tensor, words=-1)
        del tensor
        with pytest.raises(OSError, match="Tensor refused") as caught:
            await anext(stream)
        assert ref() is None
        assert caught.value.__traceback__ is not None

    async def test_holds_nothing_that_is_never_iterated(self) -> None:
        """Dropped, closed or handed off without an item, the payload is gone."""
        tensor, ref = watched()
        stream = describe(tensor)
        del tensor, stream
        assert ref() is None

        tensor, ref = watched()
        stream = describe(tensor)
        del tensor
        await stream.aclose()
        assert ref() is None
        assert [item async for item in stream] == []

    async def test_passes_none_on(self) -> None:
        """A missing payload stays missing."""

        @scrub("image", "mask")
        async def look(
            image: Tensor | None = None, mask: Any = None
        ) -> AsyncGenerator[bool, None]:
            yield image is None
            yield isinstance(mask, Payload)

        assert [item async for item in look(mask=1)] == [True, True]
        assert [item async for item in look(None, 1)] == [True, True]

    async def test_boxes_what_is_left_out(self) -> None:
        """A default is a payload as any other, and is there at every call."""

        @scrub("image")
        async def look(
            size: int = 2, /, image: Any = b"blank", *, last: int = 3
        ) -> AsyncGenerator[object, None]:
            yield size, image.take(), last

        for _ in range(2):
            assert [item async for item in look()] == [(2, b"blank", 3)]
        assert [item async for item in look(1, b"mine")] == [(1, b"mine", 3)]

        @scrub("image")
        async def alone(image: Any = b"blank") -> AsyncGenerator[object, None]:
            yield image.take()

        assert [item async for item in alone()] == [b"blank"]

    async def test_boxes_methods_and_free_keywords(self) -> None:
        """The receiver is not counted, and names may come by **kwargs."""

        class Model:
            @scrub("image", "mask")
            async def run(
                self, image: Any, /, **options: Any
            ) -> AsyncGenerator[object, None]:
                yield type(image)
                yield type(options["mask"])
                yield options["size"]

        items = [i async for i in Model().run(1, mask=2, size=3)]
        assert items == [Payload, Payload, 3]

    @pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")  # trio
    async def test_iterates_twice_by_hand(self) -> None:
        """Two calls for the first item before it came are the generator's to refuse."""
        stream = describe(Tensor())
        first, second = stream.__anext__(), stream.__anext__()
        assert await first == "word 0"
        assert await second == "word 1"
        await stream.aclose()
        assert "describe" in repr(stream)
        assert await describe(Tensor()).__anext__() == "word 0"

    async def test_sends_and_throws(self) -> None:
        """The other methods of a generator are kept, and clear the boxes as well."""

        @scrub("image")
        async def echo(image: Any, fail: bool = False) -> AsyncGenerator[Any, Any]:
            said: Any = None
            while not fail:
                try:
                    said = yield said
                except KeyError as error:
                    said = type(error)
            raise OSError(type(image.take()).__name__)

        tensor, ref = watched()
        stream = echo(tensor)
        del tensor
        assert await stream.asend(None) is None
        assert ref() is None
        assert await stream.asend(3) == 3
        assert await stream.athrow(KeyError("a")) is KeyError
        assert await anext(stream) is None
        await stream.aclose()

        tensor, ref = watched()
        stream = echo(tensor, fail=True)
        del tensor
        with pytest.raises(OSError, match="Tensor") as caught:
            await stream.asend(None)
        assert ref() is None
        assert caught.value.__traceback__ is not None

        tensor, ref = watched()
        stream = echo(tensor)
        del tensor
        with pytest.raises(ValueError, match="^$"):
            await stream.athrow(ValueError())
        assert ref() is None


def test_is_what_it_was() -> None:
    """Name, documentation and signature are those of the function."""
    assert describe.__name__ == "describe"
    assert describe.__doc__ == "Say what is in the image."
    assert list(inspect.signature(describe).parameters) == ["image", "words"]


def test_refuses_names_that_it_cannot_box() -> None:
    """A name that would stay unboxed is a mistake at definition time."""

    async def function(*args: Any, image: Any) -> AsyncGenerator[int, None]:
        yield 1

    async def open_ended(**options: Any) -> AsyncGenerator[int, None]:
        yield 1

    for name in ("imgae", "args"):
        with pytest.raises(TypeError, match=f"no parameter '{name}' to scrub"):
            scrub(name)(function)
    with pytest.raises(TypeError, match="no parameter 'options' to scrub"):
        scrub("options")(open_ended)
    scrub("anything")(open_ended)

    async def coroutine(image: Any) -> None: ...

    with pytest.raises(TypeError, match="not a generator function"):
        scrub("image")(coroutine)  # type: ignore[arg-type]


def test_holds_nothing_when_cancelled_anywhere() -> None:
    """Cancelled at any point, neither frame nor box keeps the payload."""

    async def scenario(attempt: Attempt) -> None:
        gc.disable()
        try:
            tensor, ref = watched()
            box = Payload(tensor)
            del tensor
            stream = describe(box)

            async def consume() -> None:
                async for _item in stream:
                    assert ref() is None

            await attempt(consume())
            await stream.aclose()
            assert ref() is None
        finally:
            gc.enable()

    cancel_everywhere(scenario, double=True)
    anyio.run(checkpoint)
