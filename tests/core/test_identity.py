"""A user's value is compared by identity: its own `==` may raise, or say yes."""

from typing import Any

import pytest

from lifecycle import Payload, Session, SessionRegistry, managed, scrub

pytestmark = pytest.mark.anyio


class Array:
    """Compares like an array: the answer has no truth."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth value of an array is ambiguous")


class Agreeing:
    """Is equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


@pytest.mark.parametrize("kind", [Array, Agreeing])
async def test_boxes_what_has_an_equality_of_its_own(kind: Any) -> None:
    """Such a value goes through boxes, decorators and sessions, and is dropped."""
    emptied: list[str] = []
    value = kind()
    box = Payload(value, on_release=emptied.append)
    assert not box.taken
    assert box.take() is value
    assert (box.taken, emptied) == (True, ["taken"])
    box = Payload(value, on_release=emptied.append)
    box.clear()
    assert (box.taken, emptied) == (True, ["taken", "cleared"])
    with pytest.raises(RuntimeError, match="taken or cleared"):
        box.take()

    @scrub("picture")
    async def scrubbed(picture: Any, *, other: Any = None) -> Any:
        yield picture.take() if picture is not None else other

    @managed(scrub="picture")
    async def through(picture: Any) -> Any:
        yield picture.take()

    assert [item is value async for item in scrubbed(value)] == [True]
    assert [item is value async for item in scrubbed(None, other=value)] == [True]
    assert [item is value async for item in through(value)] == [True]

    async def open_() -> Any:
        return value

    ended: list[object] = []
    async with SessionRegistry() as sessions:
        session: Session = sessions.open("a")
        with session:
            boxed = session.box(value)
            assert await session.start(open_, end=ended.append) is value
        await session.quiet()
        assert boxed.taken
    assert [each is value for each in ended] == [True]
