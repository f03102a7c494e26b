"""One client has at most its share in flight, whatever becomes of its requests."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import BodyLimit, ClientIdentity, ClientLimit
from lifecycle_asgi.prometheus import Metrics

pytestmark = pytest.mark.anyio
# Those that were given out.
KEYS = ClientIdentity(
    ["a", "b", "mine", "other", "schlüssel", "canary-key", "canary-a", "canary-b"]
)


class Busy:
    """An application that answers on a signal, and fails if so configured."""

    def __init__(self) -> None:
        self.inside = 0
        self.go = anyio.Event()
        self.error: Exception | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.inside += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})


def by(
    key: str, name: str = "x-api-key", code: str = "utf-8", **changes: Any
) -> dict[str, Any]:
    """A request with an API key."""
    return http_scope(headers=[(name.encode(), key.encode(code))], **changes)


def at(host: str) -> dict[str, Any]:
    """A request from an address, with an unknown key."""
    return by("made up", client=(host, 1))


async def call(app: Any, scope: Any) -> ScriptedServer:
    """Serve one request."""
    server = ScriptedServer()
    await app(scope, server.receive, server.send)
    return server


async def test_refuses_one_request_more_than_the_limit_and_no_other_client() -> None:
    """The third of a key with two in flight is 429; another key is served."""
    busy = Busy()
    app = ClientLimit(busy, slots=2, key=KEYS)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(call, app, by("canary-key"))
            tasks.start_soon(call, app, by("other"))
            await anyio.wait_all_tasks_blocked()
            assert busy.inside == 3
            refused = await call(app, by("canary-key"))
            tasks.start_soon(call, app, by("other"))
            await anyio.wait_all_tasks_blocked()
            assert busy.inside == 4
            busy.go.set()
    assert refused.status == 429
    headers = dict(refused.sent[0]["headers"])
    assert 1 <= int(headers[b"retry-after"]) <= 60
    assert 0 < int(headers[b"retry-after-ms"]) <= 60_000
    error = json.loads(refused.body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "canary" not in error["message"]


@pytest.mark.parametrize("end", ["answer", "failure", "cancellation"])
async def test_gives_the_share_back_however_a_request_ends(end: str) -> None:
    """An answer, an error and a cancellation all let the next one in."""
    busy = Busy()
    app = ClientLimit(busy, slots=1)
    if end == "failure":
        busy.error = OSError()
    with anyio.fail_after(120):
        for _ in range(3):
            async with anyio.create_task_group() as tasks:

                async def one() -> None:
                    with anyio.CancelScope() as scope:
                        if end == "cancellation":
                            scope.cancel()
                        try:
                            await call(app, by("mine"))
                        except OSError:
                            pass

                busy.go.set()
                tasks.start_soon(one)
            busy.error = None
    assert busy.inside == 3
    assert app._gates == {}


def test_refuses_one_text_in_place_of_keys() -> None:
    """Each letter of it would be a key, and the key itself none."""
    with pytest.raises(TypeError, match=r"write ClientIdentity\(\[key\]\)"):
        ClientIdentity("canary-key")


async def test_keeps_no_key_and_nothing_of_clients_that_left() -> None:
    """Ten thousand keys leave nothing, and no object holds one while it is served."""
    busy = Busy()
    key = "canary-key"
    clients = ClientIdentity([key, *map(str, range(10_000))])
    app = ClientLimit(busy, slots=1, key=clients)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, by(key))
            await anyio.wait_all_tasks_blocked()
            assert key.encode() not in app._gates
            assert key not in repr(app._gates) + repr(vars(app)) + repr(vars(clients))
            busy.go.set()
        for number in range(10_000):
            await call(app, by(str(number)))
    assert app._gates == {}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (by("a"), by("a"), True),
        (by("a"), by("b"), False),
        (by("bEARER a", "authorization"), by("a"), True),
        (
            by("Bearer schlüssel", "authorization"),
            by("schlüssel", code="latin-1"),
            True,
        ),
        (by("Basic a", "authorization"), by("a"), False),
        (by("a", "authorization"), http_scope(), True),
        (http_scope(), http_scope(), True),
        (http_scope(), http_scope(client=("10.0.0.2", 1)), False),
        (http_scope(), http_scope(client=("127.0.0.1", 9)), True),
        (by("a"), by("a", client=("10.0.0.2", 1)), True),
        (by("a"), http_scope(), False),
        (by("made up"), by("made up again"), True),
        (by("made up"), http_scope(), True),
        (by("made up"), by("made up", client=("10.0.0.2", 1)), False),
        (http_scope(client=None), http_scope(client=None), True),
        (at("2001:db8:1:2::3"), at("2001:db8:1:2:ffff::9"), True),
        (at("2001:db8:1:2::3"), at("2001:db8:1:3::3"), False),
        (at("::ffff:10.0.0.2"), at("10.0.0.2"), True),
        (at("fe80::1%eth0"), at("fe80::2"), True),
        (at("a:socket"), at("a:socket"), True),
        (at("a:socket"), at("b:socket"), False),
    ],
)
async def test_identifies_clients_by_key_or_else_by_address(
    first: Any, second: Any, same: bool
) -> None:
    """A key that was given out is a client wherever it is; else the address is one."""
    busy = Busy()
    app = ClientLimit(busy, slots=1, key=KEYS)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, first)
            await anyio.wait_all_tasks_blocked()
            busy.go.set()
            assert ((await call(app, second)).status == 429) is same


async def test_made_up_keys_are_no_share_of_their_own() -> None:
    """Without issued keys, a new key for each request does not help a client."""
    busy = Busy()
    app = ClientLimit(busy, slots=2)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                made_up = by(f"Bearer made-up-{number}", "authorization")
                tasks.start_soon(call, app, made_up)
            await anyio.wait_all_tasks_blocked()
            for number in range(2, 9):
                refused = await call(app, by(f"made-up-{number}"))
                assert refused.status == 429
            busy.go.set()


async def test_does_not_count_clients_without_a_key() -> None:
    """A request without a key passes, such as a health check."""
    busy = Busy()
    busy.go.set()
    app = ClientLimit(busy, slots=1, key=lambda scope: None)
    assert (await call(app, http_scope())).status == 200
    assert (await call(app, {"type": "lifespan"})).status == 200


async def test_asks_before_anything_is_read() -> None:
    """The body of a client at its limit is not read."""
    busy = Busy()
    app = ClientLimit(BodyLimit(busy, max_bytes=10), slots=1, key=KEYS)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, by("a"))
            await anyio.wait_all_tasks_blocked()
            refused = ScriptedServer(b"x" * 100)
            await app(by("a"), refused.receive, refused.send)
            busy.go.set()
    assert refused.status == 429
    assert len(refused.messages) == 2


async def test_calls_observer_with_one_gate_name() -> None:
    """However many clients: one gate in the metrics, with its refusals."""
    metrics, busy = Metrics(), Busy()
    app = ClientLimit(busy, slots=1, key=KEYS, observer=metrics)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for key in ("canary-a", "canary-a", "canary-b", "canary-b"):
                tasks.start_soon(call, app, by(key))
            await anyio.wait_all_tasks_blocked()
            busy.go.set()
    text = metrics.text().decode()
    assert 'lifecycle_gate_refusals_total{gate="client",reason="full"} 2.0' in text
    assert "canary" not in text


def test_refuses_a_share_of_nothing() -> None:
    """A limit of zero is refused."""
    with pytest.raises(ValueError, match="slots must be 1 or more, not 0"):
        ClientLimit(Busy(), slots=0)
