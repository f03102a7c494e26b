"""Cancel the request, and let the client leave, at every suspension of its path."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from asgi_kit import KINDS, Cancelled, ScriptedServer, cancel_everywhere, http_scope

from lifecycle_asgi import BodyLimit, LifecycleMiddleware, request_of


class Session:
    """Stands in for a lifecycle session."""

    cancelled_as: str = "cancelled"


async def worker(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, wait a little, stream three parts."""
    request_of(scope).attach(scope["session"])
    while (await receive())["more_body"]:
        pass
    await anyio.lowlevel.checkpoint()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"a", b"b", b"c"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    await anyio.lowlevel.checkpoint()  # work behind the response
    scope["ended"].append(True)


def stack() -> Any:
    """Both middlewares, as one would use them."""
    return LifecycleMiddleware(BodyLimit(worker, max_bytes=10**6))


@pytest.mark.parametrize(("backend", "kind", "when"), KINDS)
def test_propagates_outside_cancellation_from_every_point(
    backend: str, kind: str, when: str
) -> None:
    """A cancelled request raises the cancellation, and no task is left (peers-17)."""

    async def scenario(run: Cancelled) -> None:
        server, session = ScriptedServer(b"x", b"y", waits=True), Session()
        scope = http_scope(session=session, ended=[])
        await run.run(stack()(scope, server.receive, server.send))
        # A scope cancelled behind the application's last wait is heard by the next
        # one, outside; a native cancellation must come out of this very call.
        assert run.propagated or scope["ended"] == [True]
        assert run.propagated == run.hit or kind == "scope"
        assert session.cancelled_as == "cancelled"
        assert not scope["lifecycle"].client_gone
        assert server.status in (None, 200)

    assert cancel_everywhere(scenario, backend, kind, when) > 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_detects_a_disconnect_at_every_point(backend: str) -> None:
    """Wherever it leaves, the request ends as client_gone or had been answered."""

    async def scenario(run: Cancelled) -> None:
        server, session = ScriptedServer(b"x", b"y", waits=True), Session()
        run.cancel = server.gone.set
        scope = http_scope(session=session, ended=[])
        await run.run(stack()(scope, server.receive, server.send))
        assert not run.propagated
        gone = scope["lifecycle"].client_gone
        # What follows a complete response runs, also if the disconnect came before it.
        assert scope["ended"] == ([True] if server.complete.is_set() else [])
        assert gone or server.complete.is_set()
        assert session.cancelled_as == ("client_gone" if gone else "cancelled")
        assert server.status == 200 or (gone and server.offered)

    assert cancel_everywhere(scenario, backend, "leave", "early") > 8


@pytest.mark.parametrize(("backend", "kind", "when"), KINDS)
def test_propagates_outside_cancellation_when_client_left_too(
    backend: str, kind: str, when: str
) -> None:
    """The client's leaving never hides a cancellation that came from outside."""

    async def scenario(run: Cancelled) -> None:
        server = ScriptedServer(b"x", waits=True)
        server.on_send = lambda message: server.gone.set()
        scope = http_scope(session=Session(), ended=[])
        await run.run(stack()(scope, server.receive, server.send))
        if kind == "native":
            assert run.propagated == run.hit
        answered = scope["ended"] == [True]  # as above
        gone = scope["lifecycle"].client_gone
        assert run.propagated or not run.hit or gone or answered

    assert cancel_everywhere(scenario, backend, kind, when) > 5
