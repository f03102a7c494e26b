"""`request_scope`: any server that can say that a client left."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import anyio
import pytest

from lifecycle import SessionRegistry
from lifecycle_asgi import RequestEnded, RequestStarted, request_scope

pytestmark = pytest.mark.anyio


class Left:
    """A client that disconnects on a signal, in one of several ways."""

    def __init__(self, error: Exception | None = None) -> None:
        self.leave = anyio.Event()
        self.error = error
        self.asked = 0

    async def __call__(self) -> None:
        self.asked += 1
        await self.leave.wait()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")])
async def test_cancels_block_and_goes_on_behind_it(error: Exception | None) -> None:
    """A client who left ends the block alone, and its session counts it."""
    left = Left(error)
    async with SessionRegistry() as sessions:
        with anyio.fail_after(120):
            async with request_scope(left) as request:
                with sessions.open("a") as session:
                    request.attach(session)
                    left.leave.set()
                    await anyio.sleep_forever()
        assert request.client_gone
        assert not request.live
        assert sessions.statistics().outcomes["client_gone"] == 1
    assert left.asked == 1


async def test_stops_listening_when_block_is_left() -> None:
    """A block that ends by itself says nothing of its client."""
    left = Left()
    with anyio.fail_after(120):
        async with request_scope(left) as request:
            await anyio.lowlevel.checkpoint()
    assert not request.client_gone


@pytest.mark.parametrize("leaves", [False, True])
async def test_passes_error_of_block_unwrapped(leaves: bool) -> None:
    """An error arrives as it was raised, also when the client leaves with it."""
    left = Left()
    mine = ValueError("mine")
    with anyio.fail_after(120), pytest.raises(ValueError, match="mine") as caught:
        async with request_scope(left):
            if leaves:
                left.leave.set()
            raise mine
    assert caught.value is mine


async def test_raises_what_kept_it_from_listening() -> None:
    """A mistake in `gone` is raised as it is, not in a group, and not for leaving."""
    left = Left(RuntimeError("deaf"))
    with anyio.fail_after(120), pytest.raises(RuntimeError, match="^deaf$"):
        async with request_scope(left) as request:
            left.leave.set()
            await anyio.sleep_forever()
    assert not request.client_gone


async def test_propagates_outside_cancellation() -> None:
    """Only the client's own cancellation ends at the block."""
    behind = False
    with anyio.CancelScope() as outside:
        async with request_scope(Left()):
            outside.cancel()
            await anyio.sleep_forever()
        behind = True
    assert outside.cancelled_caught
    assert not behind


async def test_propagates_outside_cancellation_when_client_left_too() -> None:
    """A request cancelled by both is cancelled."""
    left, behind = Left(), False
    with anyio.CancelScope() as outside:
        async with request_scope(left):
            left.leave.set()
            outside.cancel()
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        behind = True
    assert outside.cancelled_caught
    assert not behind


async def test_counts_cancellation_as_disconnect_when_the_server_cancels() -> None:
    """A server that cancels on a disconnect needs no listener: sessions are notified."""
    async with SessionRegistry() as sessions:
        with anyio.CancelScope() as server:
            async with request_scope() as request:
                with sessions.open("a") as session:
                    request.attach(session)
                    assert not request.client_gone
                    server.cancel()
                    await anyio.sleep_forever()
        assert server.cancelled_caught
        assert request.client_gone
        assert sessions.statistics().outcomes["client_gone"] == 1


async def test_hears_client_of_plain_asyncio_server(anyio_backend_name: str) -> None:
    """A reader at its end is all that it takes on a bare socket."""
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own streams")
    done: asyncio.Future[bool] = asyncio.Future()

    async def serve(reader: Any, writer: Any) -> None:
        async def gone() -> None:
            while await reader.read(1024):
                pass

        async with request_scope(gone) as request:
            await anyio.sleep_forever()
        done.set_result(request.client_gone)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"work")
        writer.close()
        with anyio.fail_after(120):
            assert await done


async def test_keeps_nothing_alive() -> None:
    """A block left by an error frees its objects, without the garbage collector."""

    class Payload:
        """Something heavy."""

    seen: list[weakref.ref[Payload]] = []

    async def work() -> None:
        async with request_scope(Left()):
            payload = Payload()
            seen.append(weakref.ref(payload))
            raise ValueError("mine")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="mine") as caught:
            await work()
        del caught
        assert seen[0]() is None
    finally:
        gc.enable()


async def test_refuses_to_attach_what_is_no_session() -> None:
    """Otherwise the caller with the id would never learn of the disconnect."""
    async with request_scope(Left()) as request:
        with pytest.raises(TypeError, match="a session is attached, .*, not str"):
            request.attach("request-1")  # type: ignore[arg-type]


TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Watched:
    """Scopes whose events are kept."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def scope(self, gone: Any = None) -> request_scope:
        """An attached session."""
        headers = [(b"TraceParent", TRACE), (b"x", b"secret")]
        observer = self.events.append
        return request_scope(gone, observer=observer, operation="say", headers=headers)

    def outcome(self) -> tuple[str, str | None]:
        """How the one request ended, and what it failed with."""
        first, last = self.events[0], self.events[-1]
        ends = [each for each in self.events if isinstance(each, RequestEnded)]
        assert isinstance(first, RequestStarted)
        assert ends == [last]
        assert first.request == last.request
        assert (first.operation, first.traceparent) == ("say", TRACE.decode())
        assert "secret" not in str(self.events)
        return last.outcome, last.error


async def test_reports_how_a_request_ended() -> None:
    """By itself, by an error, by a client who left, or by a cancellation."""
    watched = Watched()
    async with watched.scope(Left()) as request:
        with request.phase("stream"):
            request.first_item()
        request.count(tokens=2)
    assert watched.outcome() == ("completed", None)
    kinds = [type(each).__name__ for each in watched.events]
    assert kinds == ["RequestStarted", "FirstItem", "PhaseEnded", "RequestEnded"]
    assert watched.events[-1].counts == {"tokens": 2}
    watched = Watched()
    with pytest.raises(ValueError, match="mine"):
        async with watched.scope(Left()):
            raise ValueError("mine")
    assert watched.outcome() == ("failed", "ValueError")
    watched, left = Watched(), Left()
    left.leave.set()
    async with watched.scope(left):
        await anyio.sleep_forever()
    assert watched.outcome() == ("client_gone", None)
    for gone, outcome in [(Left(), "cancelled"), (None, "client_gone")]:
        watched = Watched()
        with anyio.CancelScope() as server:
            async with watched.scope(gone):
                server.cancel()
                await anyio.sleep_forever()
        assert watched.outcome() == (outcome, None)


async def test_reports_an_error_of_waiting_for_the_disconnect() -> None:
    """A request that fails for a deaf server has failed, once."""
    watched, left = Watched(), Left(RuntimeError("deaf"))
    left.leave.set()
    with pytest.raises(RuntimeError, match="deaf"):
        async with watched.scope(left):
            await anyio.sleep_forever()
    assert watched.outcome() == ("failed", "RuntimeError")


async def test_reports_the_outcome_of_its_session() -> None:
    """A session that is attached knows better."""
    watched = Watched()
    async with SessionRegistry() as sessions, watched.scope(Left()) as request:
        with sessions.open("a") as session:
            request.attach(session)
            session.close("deadline")
    assert watched.outcome() == ("deadline", None)
    assert watched.events[-1].session == session.id
