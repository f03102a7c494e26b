"""Admission between clients: lanes, shares, and bodies that stand in nobody's way."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import Admission, MediaProfile

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
OK = {"type": "http.response.start", "status": 200, "headers": []}
# Each image counts one MiB, whatever it is.
MIB = MediaProfile(
    work_bytes_per_pixel=0, tensor_bytes_per_pixel=1, assumed_pixels=2**20
)
PART = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


def text(size: int = 100) -> bytes:
    """A request without media."""
    return json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()


def picture(number: int = 1, filling: int = 0) -> bytes:
    """A request with images."""
    content = [*[PART] * number, {"type": "text", "text": "x" * filling}]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


class Served:
    """An application that holds each request until `go`, and in which order they came."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.statuses: dict[str, list[int | None]] = {}
        self.go = anyio.Event()
        self.held: dict[str, anyio.Event] = {}

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        await receive()
        self.order.append(scope["client"][0])
        await self.held.get(scope["client"][0], self.go).wait()
        await send(OK)
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(
        self, admission: Admission, client: str, body: bytes, **scope: Any
    ) -> None:
        """Send one request of *client*."""
        headers = [(b"content-length", str(len(body)).encode())]
        server = ScriptedServer(body)
        made = http_scope(CHAT, headers=headers, client=(client, 1), **scope)
        with anyio.fail_after(120):
            await admission(made, server.receive, server.send)
        self.statuses.setdefault(client, []).append(server.status)


def admission_of(served: Served, **options: Any) -> Admission:
    """Admission of four images at a time."""
    options = {"bytes": 6 * 2**20, "profile": MIB, **options}
    return Admission(served.app, environment={}, **options)


async def test_serves_small_texts_while_pictures_wait() -> None:
    """Text has a lane of its own: the queue of pictures does not delay it."""
    served = Served()
    served.held["text"] = anyio.Event()
    served.held["text"].set()
    admission = admission_of(served, max_waiting=16)
    async with anyio.create_task_group() as tasks:
        for _ in range(12):
            tasks.start_soon(served.ask, admission, "pictures", picture())
        await anyio.wait_all_tasks_blocked()
        assert admission.statistics()["requests"].waiting >= 4
        for _ in range(50):
            await served.ask(admission, "text", text())
        assert served.statuses["text"] == [200] * 50
        served.go.set()


async def test_serves_small_texts_while_bodies_are_slow() -> None:
    """Clients that declare much and send nothing do not delay text."""
    served = Served()
    served.go.set()
    admission = admission_of(served, max_waiting=16)
    slow = []
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            server = ScriptedServer()
            server.messages = []
            slow.append(server)
            headers = [(b"content-length", b"300000")]
            scope = http_scope(CHAT, headers=headers, client=(f"slow{number}", 1))
            tasks.start_soon(admission, scope, server.receive, server.send)
        await anyio.wait_all_tasks_blocked()
        assert admission.statistics()["bodies"].waiting == 7
        await served.ask(admission, "text", text())
        assert served.statuses["text"] == [200]
        for server in slow:
            server.gone.set()


async def test_serves_clients_in_turns() -> None:
    """A client with one request does not wait for all that another one has queued."""
    served = Served()
    served.held["many"] = anyio.Event()
    admission = admission_of(served, max_waiting=32)
    async with anyio.create_task_group() as tasks:
        for _ in range(16):
            tasks.start_soon(served.ask, admission, "many", picture())
        await anyio.wait_all_tasks_blocked()
        assert served.order == ["many"] * 4
        tasks.start_soon(served.ask, admission, "one", picture())
        await anyio.wait_all_tasks_blocked()
        assert "one" not in served.order
        served.go.set()
        served.held["many"].set()
    assert served.order.index("one") < 8  # of seventeen
    assert served.statuses["many"] == [200] * 16


async def test_refuses_a_client_over_its_share() -> None:
    """429 with Retry-After beyond half of the queue, while others may still wait."""
    served = Served()
    admission = admission_of(served, max_waiting=4)
    async with anyio.create_task_group() as tasks:
        for _ in range(4 + 2):
            tasks.start_soon(served.ask, admission, "many", picture())
        await anyio.wait_all_tasks_blocked()
        await served.ask(admission, "many", picture())
        assert served.statuses["many"] == [429]
        assert admission.statistics()["requests"].refused == 1
        tasks.start_soon(served.ask, admission, "other", picture())
        await anyio.wait_all_tasks_blocked()
        assert "other" not in served.statuses
        tasks.start_soon(served.ask, admission, "third", picture())
        tasks.start_soon(served.ask, admission, "fourth", picture())
        await anyio.wait_all_tasks_blocked()
        late = {name: served.statuses.get(name) for name in ("third", "fourth")}
        assert [503] in late.values()
        assert None in late.values()
        served.go.set()
    assert served.statuses["many"] == [429] + [200] * 6
    assert served.statuses["other"] == [200]


async def test_forgets_clients_that_do_not_wait() -> None:
    """Nothing is kept of a client whose requests have been served."""
    served = Served()
    served.go.set()
    admission = admission_of(served)
    for number in range(20):
        await served.ask(admission, f"client{number}", picture())
    lanes = (admission._small, admission._bodies, admission._requests)
    assert not any(lane._waiting for lane in lanes)


async def test_tells_clients_apart_by_the_keys_of_the_server() -> None:
    """With several keys a client is its key, and with a single one its address."""
    served = Served()
    for keys, clients in ((("a", "b"), 1), (("a",), 2)):
        admission = admission_of(served, api_keys=keys)
        headers = [(b"authorization", b"Bearer a")]
        found = {
            admission._client_of(http_scope(headers=headers, client=(address, 1)))
            for address in ("10.0.0.1", "10.0.0.2")
        }
        assert len(found) == clients


async def test_keeps_room_for_text_when_small_requests_bring_pictures() -> None:
    """However many of them wait, half of the lane of small requests is free."""
    served = Served()
    admission = admission_of(served, bytes=16 * 2**20, max_waiting=8)
    async with anyio.create_task_group() as tasks:
        for number in range(12 + 16):
            client = f"client{number}"
            tasks.start_soon(served.ask, admission, client, picture(filling=8000))
        await anyio.wait_all_tasks_blocked()
        lanes = admission.statistics()
        assert lanes["requests"].waiting == 8
        assert 0 < lanes["small"].bytes_in_use <= (lanes["small"].bytes or 0) // 2
        served.go.set()
