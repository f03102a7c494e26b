"""Calls of decorated functions that type checkers accept, with the types they infer."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import anyio

from lifecycle import (
    Gate,
    Lease,
    Payload,
    Session,
    SessionRegistry,
    Stream,
    in_thread,
    managed,
    scrub,
)

gate = Gate(slots=1)
sessions = SessionRegistry()


@managed(gate=gate, cost=1)
async def admitted(name: str, size: int) -> AsyncIterator[bytes]:
    yield b""


@managed(gate=gate, cost=len)
async def leased(lease: Lease, name: str) -> AsyncIterator[str]:
    yield name


@managed(sessions=sessions, key=lambda name: name)
async def tracked(name: str, session: Session, size: int = 3) -> AsyncIterator[str]:
    yield name


@managed(gate=gate, sessions=sessions, key=lambda name: name)
async def both(lease: Lease, session: Session, name: str) -> AsyncIterator[str]:
    async def stream() -> AsyncIterator[str]:
        yield name

    return stream()


@managed(gate=gate, sessions=sessions, key=str)
async def loose(request: Any, session: Session) -> AsyncIterator[str]:
    yield ""


@managed(gate=gate, cost=len, scrub="picture")
async def boxed(picture: Payload[bytes], size: int) -> AsyncIterator[int]:
    yield len(picture.take())


@scrub("picture")
async def scrubbed(picture: Payload[bytes], size: int) -> AsyncGenerator[int, str]:
    yield len(picture.take())


@in_thread
def blocking(name: str, size: int = 3) -> Iterator[str]:
    yield name


@managed(gate=gate)
@in_thread(limiter=anyio.CapacityLimiter(2))
def limited(name: str) -> Iterator[str]:
    yield name


@managed(gate=gate)
def managed_blocking(name: str) -> Iterator[str]:
    yield name


class Model:
    @managed(gate=gate, sessions=sessions, key=lambda model, name: name)
    async def ask(
        self, session: Session, lease: Lease, name: str
    ) -> AsyncIterator[int]:
        yield 1


async def calls() -> None:
    assert_type(admitted("x", 4), Stream[bytes])
    assert_type(leased(name="x"), Stream[str])
    assert_type(tracked("x", 4), Stream[str])
    assert_type(both("x"), Stream[str])
    loose(3)
    assert_type(boxed(b"", size=4), Stream[int])
    async for item in scrubbed(b"", 4):
        assert_type(item, int)
    assert_type(await scrubbed(b"", 4).asend("x"), int)
    assert_type(await scrubbed(b"", 4).athrow(OSError()), int)
    async for word in blocking("x", size=4):
        assert_type(word, str)
    assert_type(limited("x"), Stream[str])
    assert_type(managed_blocking("x"), Stream[str])
    assert_type(Model().ask("x"), Stream[int])
    assert_type(Model.ask(Model(), "x"), Stream[int])
    call: Callable[[str], AsyncIterator[str]] = both
    call("x")
