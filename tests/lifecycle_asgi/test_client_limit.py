"""One client has at most its share in flight, whatever becomes of its requests."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle.events import AdmissionRefused
from lifecycle.testing import simulate
from lifecycle_asgi import Admission, ClientIdentity

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


class Slow(Busy):
    """One that takes 20 seconds."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await anyio.sleep(20)
        await super().__call__(scope, receive, send)


def by(
    key: str, name: str = "x-api-key", code: str = "utf-8", **changes: Any
) -> dict[str, Any]:
    """A request with an API key."""
    return asks(headers=[(name.encode(), key.encode(code))], **changes)


def asks(**changes: Any) -> dict[str, Any]:
    """A request with a body."""
    return http_scope(method="POST", path="/v1/completions", **changes)


def limited(app: Any, most: int, **options: Any) -> Admission:
    """Admission that serves so many requests of one client at a time."""
    return Admission(app, environment={}, per_client=most, **options)


def at(host: str) -> dict[str, Any]:
    """A request from an address, with an unknown key."""
    return by("made up", client=(host, 1))


async def call(app: Any, scope: Any) -> ScriptedServer:
    """Serve one request."""
    server = ScriptedServer(b"{}")
    await app(scope, server.receive, server.send)
    return server


async def test_refuses_one_request_more_than_the_limit_and_no_other_client() -> None:
    """The third of a key with two in flight is 429; another key is served."""
    busy = Busy()
    app = limited(busy, 2, client=KEYS)
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


@pytest.mark.parametrize("shadow", [False, True])
async def test_gives_a_reason_of_its_own(shadow: bool) -> None:
    """It is neither a full queue nor a share of one; in shadow nothing is refused."""
    busy, events = Busy(), list[Any]()
    app = limited(busy, 1, observer=events.append, shadow=shadow)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, by("mine"))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(call, app, by("mine"))
            await anyio.wait_all_tasks_blocked()
            assert busy.inside == 1 + shadow
            busy.go.set()
    refused = [it for it in events if isinstance(it, AdmissionRefused)]
    found = [(it.gate, it.reason) for it in refused]
    assert found == [("admission-bodies", "client_limit")] * (not shadow)


@pytest.mark.parametrize("others", [0, 3])
def test_says_when_a_request_of_the_client_will_have_ended(others: int) -> None:
    """`Retry-After` is what requests take by now, give or take a half, not a second."""

    async def serve_and_refuse() -> list[int]:
        slow = Slow()
        slow.go.set()
        app = limited(slow, 1, client=KEYS)
        await anyio.sleep(3600)  # an idle time, which says nothing
        found = []
        async with anyio.create_task_group() as tasks:

            async def keep_asking(name: str) -> None:
                for _ in range(5):
                    await call(app, by(name))

            for name in ["mine", "other", "a", "b"][: others + 1]:
                tasks.start_soon(keep_asking, name)
                await anyio.sleep(5)
            await anyio.sleep(50)
            for _ in range(5):
                refused = await call(app, by("mine"))
                found.append(int(dict(refused.sent[0]["headers"])[b"retry-after"]))
        return found

    found = simulate(serve_and_refuse, seed=1).value
    assert all(7 <= seconds <= 40 for seconds in found), found


@pytest.mark.parametrize("end", ["answer", "failure", "cancellation"])
async def test_gives_the_share_back_however_a_request_ends(end: str) -> None:
    """An answer, an error and a cancellation all let the next one in."""
    busy = Busy()
    app = limited(busy, 1)
    with anyio.fail_after(120):
        for _ in range(3):
            busy.go = anyio.Event()
            busy.error = OSError() if end == "failure" else None
            async with anyio.create_task_group() as tasks:
                cut = anyio.CancelScope()

                async def one(cut: anyio.CancelScope = cut) -> None:
                    with cut, suppress(OSError):
                        await call(app, by("mine"))

                tasks.start_soon(one)
                await anyio.wait_all_tasks_blocked()
                if end == "cancellation":
                    cut.cancel()
                busy.go.set()
    assert busy.inside == 3
    assert not app._shares._in_flight


def test_refuses_one_text_in_place_of_keys() -> None:
    """Each letter of it would be a key, and the key itself none."""
    with pytest.raises(TypeError, match=r"write ClientIdentity\(\[key\]\)"):
        ClientIdentity("canary-key")


@pytest.mark.thorough
async def test_keeps_no_key_and_nothing_of_clients_that_left() -> None:
    """Two thousand keys leave nothing, and no object holds one while it is served."""
    busy = Busy()
    key = "canary-key"
    clients = ClientIdentity([key, *map(str, range(2_000))])
    app = limited(busy, 1, client=clients)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, by(key))
            await anyio.wait_all_tasks_blocked()
            (held,) = app._shares._in_flight
            assert key not in held + repr(vars(app)) + repr(vars(clients))
            busy.go.set()
        for number in range(2_000):
            await call(app, by(str(number)))
    assert not app._shares._in_flight


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
        (by("a", "authorization"), asks(), True),
        (asks(), asks(), True),
        (asks(), asks(client=("10.0.0.2", 1)), False),
        (asks(), asks(client=("127.0.0.1", 9)), True),
        (by("a"), by("a", client=("10.0.0.2", 1)), True),
        (by("a"), asks(), False),
        (by("made up"), by("made up again"), True),
        (by("made up"), asks(), True),
        (by("made up"), by("made up", client=("10.0.0.2", 1)), False),
        (asks(client=None), asks(client=None), True),
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
    app = limited(busy, 1, client=KEYS)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, first)
            await anyio.wait_all_tasks_blocked()
            busy.go.set()
            assert ((await call(app, second)).status == 429) is same


async def test_made_up_keys_are_no_share_of_their_own() -> None:
    """Without issued keys, a new key for each request does not help a client."""
    busy = Busy()
    app = limited(busy, 2)
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


async def test_counts_no_request_without_a_body() -> None:
    """Such as a health check; and other scopes pass."""
    busy = Busy()
    app = limited(busy, 1)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, asks())
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(call, app, http_scope(method="GET"))
            await anyio.wait_all_tasks_blocked()
            assert busy.inside == 2
            busy.go.set()
        await call(app, {"type": "lifespan"})
    assert busy.inside == 3


async def test_refuses_before_anything_is_read() -> None:
    """The body of a client at its limit is dropped, after it has been answered."""
    busy = Busy()
    app = limited(busy, 1, client=KEYS)
    refused = ScriptedServer(b"x" * 100)
    read_before: list[int | None] = []

    async def receive() -> Any:
        read_before.append(refused.status)
        return await refused.receive()

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, app, by("a"))
            await anyio.wait_all_tasks_blocked()
            await app(by("a"), receive, refused.send)
            busy.go.set()
    assert refused.status == 429
    assert set(read_before) <= {429}


async def test_counts_what_it_refuses_and_names_no_client() -> None:
    """In the lane to which the request came."""
    busy = Busy()
    app = limited(busy, 1, client=KEYS)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for key in ("canary-a", "canary-a", "canary-b", "canary-b"):
                tasks.start_soon(call, app, by(key))
            await anyio.wait_all_tasks_blocked()
            busy.go.set()
    assert [lane.refused for lane in app.statistics().values()] == [0, 2, 0]
    assert "canary" not in repr(app.statistics())


async def test_counts_without_refusing_in_shadow() -> None:
    """All are served, and those beyond the limit are in the statistics."""
    busy = Busy()
    app = limited(busy, 1, shadow=True)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(call, app, asks())
            await anyio.wait_all_tasks_blocked()
            assert busy.inside == 3
            busy.go.set()
    assert app.statistics()["bodies"].over_limit == 2
    assert not app._shares._in_flight


def test_takes_no_limit_for_a_limit_of_nothing() -> None:
    """Zero is unlimited, as in `slots`; less is refused."""
    assert limited(Busy(), 0)._shares is None
    with pytest.raises(ValueError, match="per_client must be 0 or more, not -1"):
        limited(Busy(), -1)
