"""Admission with a price, and with gates, of the caller's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from asgi_kit import ScriptedServer, http_scope

from lifecycle import Gate, GateFull, Lease
from lifecycle_asgi import (
    Admission,
    ApiError,
    BodyTooLarge,
    MemoryEstimate,
    media_body,
)
from lifecycle_asgi.admission import admitted_request

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = b'{"prompt": "Why?"}'
OK = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"done"}


def head_of(body: bytes, client: str = "10.0.0.1") -> dict[str, Any]:
    """The scope of a request with *body*."""
    length = (b"content-length", str(len(body)).encode())
    return http_scope(CHAT, headers=[length], client=(client, 1))


async def ask(admission: Admission, body: bytes = BODY) -> ScriptedServer:
    """Send one request and return what its client got."""
    server = ScriptedServer(body)
    with anyio.fail_after(120):
        await admission(head_of(body), server.receive, server.send)
    return server


@asynccontextmanager
async def tasks_in_time() -> AsyncIterator[TaskGroup]:
    """A task group that ends in time."""
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            yield tasks


class Application:
    """Notes the bytes held and the body, and answers once it may."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.bodies: list[bytes] = []
        self.may_end = anyio.Event()
        self.admission: Admission | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        assert self.admission is not None
        self.bodies.append((await receive())["body"])
        self.held.append(self.admission.statistics()["requests"].bytes_in_use)
        await self.may_end.wait()
        await send(OK)
        await send(END)


def admission_of(app: Application, **options: Any) -> Admission:
    """The application in an admission of its own; it may end its requests."""
    app.admission = Admission(app, environment={}, **options)
    app.may_end.set()
    return app.admission


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_admits_what_price_says(asynchronous: bool) -> None:
    """In time, or once it is known: the application begins with it and no less."""

    def at_once(_: Any, body: bytes) -> MemoryEstimate:
        return MemoryEstimate(work=len(body), tensors=5000)

    async def later(scope: Any, body: bytes) -> MemoryEstimate:
        await anyio.lowlevel.checkpoint()
        return at_once(scope, body)

    app = Application()
    server = await ask(admission_of(app, price=later if asynchronous else at_once))
    assert server.status == 200
    assert app.held == [4 * len(BODY) + 5000]


async def test_refuses_what_price_refuses() -> None:
    """With its status and words, in the format of the API, and nothing is held."""

    async def price(_scope: Any, _body: bytes) -> None:
        raise ApiError(422, "The prompt has no end; add one", code="endless")

    app = Application()
    admission = admission_of(app, price=price)
    server = await ask(admission)
    assert server.status == 422
    assert b"endless" in server.body
    assert app.bodies == []
    assert not any(lane.bytes_in_use for lane in admission.statistics().values())


async def test_passes_on_a_failure_of_price() -> None:
    """A mistake in it is the server's to report, and nothing is held."""

    def price(_scope: Any, _body: bytes) -> None:
        raise ZeroDivisionError

    admission = admission_of(Application(), price=price)
    with pytest.raises(ZeroDivisionError):
        await ask(admission)
    assert not any(lane.bytes_in_use for lane in admission.statistics().values())


async def test_frees_a_body_that_price_has_parsed() -> None:
    """Nothing refers to it while the request waits, and its bytes do not count."""
    references: list[int] = []

    async def price(scope: Any, body: bytes) -> MemoryEstimate:
        admitted_request(scope).drop_body()
        references.append(sys.getrefcount(body))
        return MemoryEstimate(work=10)

    app = Application()
    server = ScriptedServer(BODY[:5], BODY[5:])
    with anyio.fail_after(120):
        await admission_of(app, price=price)(head_of(BODY), server.receive, server.send)
    assert (app.bodies, app.held) == ([b""], [10])
    assert references == [2]  # that of this function, and of the call


@pytest.mark.parametrize("size", [1000, 2**21])
async def test_finds_the_media_of_large_bodies_in_a_thread(
    size: int, monkeypatch: Any
) -> None:
    """The event loop goes on meanwhile, and no thread keeps the body."""
    found_in: list[int] = []

    def find(*arguments: Any, **options: Any) -> list[Any]:
        found_in.append(threading.get_ident())
        return []

    monkeypatch.setattr(media_body, "find_media", find)
    app = Application()
    server = ScriptedServer(b'{"image": "', b"x" * size, b'"}')
    head = head_of(b"x" * (size + 13))
    with anyio.fail_after(120):
        await admission_of(app)(head, server.receive, server.send)
    (thread,), (body,) = found_in, app.bodies
    assert len(body) == size + 13
    app.bodies.clear()
    assert sys.getrefcount(body) == 2
    assert (thread != threading.get_ident()) == (size > 2**20)


def test_finds_media_in_one_event_loop_after_another() -> None:
    """Of either kind: the application of a module may be tested on both."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(OK)
        await send(END)

    admission = Admission(app, environment={})
    for backend in ("asyncio", "trio", "asyncio"):

        async def ask_once() -> int | None:
            return (await ask(admission, b'{"image": "%b"}' % bytes(2**21))).status

        assert anyio.run(ask_once, backend=backend) == 200


async def test_lease_outlives_a_request_that_gives_it_away() -> None:
    """Its taker releases it, as an engine may read a payload after its client left."""
    leases: list[Lease | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leases.append(admitted_request(scope).take_lease())
        await send(OK)
        await send(END)

    admission = Admission(
        app, environment={}, price=lambda *_: MemoryEstimate(work=700)
    )
    await ask(admission)
    now = admission.statistics
    assert now()["requests"].bytes_in_use == 700 + 3 * len(BODY)
    lease = leases[0]
    assert lease is not None
    lease.release()
    assert now()["requests"].bytes_in_use == 0


async def test_learns_from_what_the_tensors_have() -> None:
    """The next request of the size is charged with that."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        held.append(admission.statistics()["requests"].bytes_in_use)
        admitted_request(scope).learn(2000)
        await send(OK)
        await send(END)

    held: list[int] = []
    admission = Admission(
        app, environment={}, price=lambda *_: MemoryEstimate(tensors=1000)
    )
    await ask(admission)
    await ask(admission)
    assert held == [3 * len(BODY) + 1000, 3 * len(BODY) + 2000]
    assert list(admission.ratios.values()) == [2.0]


async def test_shares_a_gate_with_other_work() -> None:
    """What other work holds keeps a request out, and the gate counts both."""
    app, slots = Application(), Gate(slots=1, name="mine")
    admission = admission_of(app, gates={"slots": slots})
    assert slots in admission.gates
    async with tasks_in_time() as tasks:
        with slots.try_admit():
            tasks.start_soon(ask, admission)
            await anyio.wait_all_tasks_blocked()
            assert (app.bodies, admission.statistics()["slots"].waiting) == ([], 1)
    assert app.bodies == [BODY]


async def test_takes_all_of_a_shared_gate_that_is_small(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A body and a guess are no reason to refuse for ever; what is known is."""
    app, room = Application(), Gate(bytes=50)
    estimates = [
        MemoryEstimate(work=40, tensors=100, assumed=100),
        MemoryEstimate(work=66),
        MemoryEstimate(work=67),
    ]
    admission = admission_of(
        app, gates={"requests": room}, price=lambda *_: estimates.pop(0)
    )
    assert (await ask(admission)).status == 200
    assert (await ask(admission)).status == 200
    assert app.held == [50, 50]
    server = await ask(admission)
    assert server.status == 413
    said = "needs 67 B of memory, and this server has 66 B for one; send less"
    assert said in server.sent[1]["body"].decode()
    (record,) = caplog.records  # as each refusal
    logged = record.getMessage()
    assert "413 request_too_large: The request " + said in logged


def test_names_the_lanes_there_are() -> None:
    """A gate for no lane would limit nothing, in silence."""
    with pytest.raises(ValueError, match="'queue'.*small, bodies, requests"):
        Admission(Application(), environment={}, gates={"queue": Gate(slots=1)})


async def test_checks_a_request_by_its_head() -> None:
    """As it does itself, for a server that asks before all else."""
    admission = admission_of(Application(), slots=1, max_waiting=1, max_body=100)
    slots = admission.gates[-1]
    admission.check(head_of(BODY))
    with pytest.raises(BodyTooLarge):
        admission.check(head_of(b"x" * 101))
    async with tasks_in_time() as tasks:
        with slots.try_admit():
            tasks.start_soon(ask, admission)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(GateFull):
                admission.check(head_of(BODY, "10.0.0.2"))


async def test_bodies_wait_for_no_bytes_at_a_gate_without_any() -> None:
    """A gate of yours that counts requests alone limits no bytes."""
    gates = {"bodies": Gate(slots=2, name="mine"), "small": Gate(slots=2, name="own")}
    app = Application()
    admission = admission_of(app, gates=gates, max_waiting=0)
    server = ScriptedServer(b"x" * 100_000, b"y" * 100_000)
    with gates["bodies"].try_admit(bytes=1), anyio.fail_after(60):
        await admission(http_scope(), server.receive, server.send)
    assert server.status == 200
