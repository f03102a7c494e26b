"""The live view of a real server: faults that are planted in it, and who may look."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import pytest
from asgi_kit import ScriptedServer, http_scope
from live_kit import CANARY, asked, live_server

from lifecycle import Gate
from lifecycle.lowlevel import owner
from lifecycle_asgi import (
    Admission,
    ClientIdentity,
    EngineView,
    GateView,
    LifecycleMiddleware,
    LiveView,
    RequestView,
    WarningLimits,
    client_address,
    find_warnings,
    local_client,
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server process with all the faults, and its port."""
    with live_server() as port:
        yield port


def events(port: int) -> Iterator[dict[str, Any]]:
    """The events that a viewer gets, which connects again as a browser does."""
    while True:
        url = f"http://127.0.0.1:{port}/_lifecycle/events"
        with httpx2.stream("GET", url, timeout=60) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    assert CANARY not in line
                    yield json.loads(line.removeprefix("data: "))


def warning(port: int, kind: str, path: str, within: int = 12) -> dict[str, Any]:
    """The first warning of this kind; a busy machine may take some events more."""
    for _, event in zip(range(within), events(port), strict=False):
        subjects = {"one", "engine"}
        subjects |= {
            each["id"] for each in event["requests"] if each["what"] == f"POST {path}"
        }
        for each in event["warnings"]:
            if each["kind"] == kind and each["subject"] in subjects:
                return each | {"event": event}
    raise AssertionError(f"no warning {kind!r} in {within} events: {event}")


def post(port: int, what: str, id_: str, **headers: str) -> httpx2.Response:
    """Ask the view to do something."""
    url = f"http://127.0.0.1:{port}/_lifecycle/{what}"
    return httpx2.post(url, content=id_, headers=headers, timeout=60)


def row(event: dict[str, Any], path: str) -> dict[str, Any]:
    """The one request to *path*."""
    (found,) = [each for each in event["requests"] if each["what"] == f"POST {path}"]
    return found


def wait_row(port: int, path: str, **expected: Any) -> dict[str, Any]:
    """The request to *path*, once it is as expected."""
    for _, event in zip(range(30), events(port), strict=False):
        for each in event["requests"]:
            if each["what"] == f"POST {path}" and expected.items() <= each.items():
                return each
    raise AssertionError(f"{path} is not {expected}: {event}")


# Each planted fault is named ----------------------------------------------------


def test_names_work_that_outlives_its_client(port: int) -> None:
    """Work that goes on after its client left is a warning, with the bytes it holds."""
    with asked(port, "/outlive"):
        wait_row(port, "/outlive")
    found = warning(port, "work after its client left", "/outlive")
    assert found["subject"] == row(found["event"], "/outlive")["id"]
    assert "after its client left" in found["text"]
    shown = wait_row(port, "/outlive", bytes=3 * 2**20)
    assert shown["phase"] == "ending"
    assert shown["gone_s"] > 0


def test_names_payload_held_after_hand_off(port: int) -> None:
    """Bytes that are still held while the answer streams are a warning."""
    with asked(port, "/held"), asked(port, "/released"):
        found = warning(port, "payload held after hand-off", "/held")
        shown = row(found["event"], "/held")
        assert found["subject"] == shown["id"]
        assert f"POST /held {shown['id']} of 127.0.0.1 holds 5.0 MiB" in found["text"]
        assert shown["phase"] == "streaming"
        other = wait_row(port, "/released", phase="streaming")
        assert other["warnings"] == []
        assert other["tokens"] > 0


def test_names_overdue_request(port: int) -> None:
    """A request that is in one phase for too long is a warning."""
    with asked(port, "/slow"):
        found = warning(port, "overdue", "/slow")
        shown = row(found["event"], "/slow")
        assert found["subject"] == shown["id"]
        assert shown["phase"] == "preparing"


def test_names_request_that_its_client_gave_up(port: int) -> None:
    """A request is overdue once its client's own timeout is over."""
    with asked(port, "/held", "x-stainless-read-timeout: 0.25"):
        found = warning(port, "overdue", "/held")
        assert "gives up after 0.2 s" in found["text"]


def test_names_gate_that_binds(port: int) -> None:
    """A gate whose queue does not empty is a warning, and its waiter is shown there."""
    with asked(port, "/binding"), asked(port, "/binding"):
        found = warning(port, "gate binding", "/binding")
        assert found["subject"] == "one"
        assert "1 request waits" in found["text"]
        waiting = wait_row(port, "/binding", phase="waiting")
        assert waiting["gate"] == "one"
        assert waiting["waits_for"] == "gate one"
        gates = {each["name"]: each for each in found["event"]["gates"]}
        assert gates["one"]["slots_in_use"] == 1
        assert gates["one"]["waiting"] == 1


def test_names_reader_that_is_behind(port: int) -> None:
    """A client that does not read what was sent is a warning."""
    with asked(port, "/flood"):
        found = warning(port, "reader behind", "/flood")
        assert found["subject"] == row(found["event"], "/flood")["id"]


def test_names_slow_engine(port: int) -> None:
    """An engine that is not serving is a warning, and its restarts are shown."""
    with asked(port, "/busy"):
        found = warning(port, "engine slow", "/busy")
        assert found["subject"] == "engine"
        assert found["event"]["engine"]["restarts"] == 2


@pytest.mark.thorough
def test_names_each_fault_within_two_seconds(port: int) -> None:
    """Limits and interval together leave no fault unnamed for longer than two seconds."""
    default = WarningLimits()
    limits = [default.gone_s, default.held_s, default.waiting_s]
    limits += [default.behind_s, default.engine_s]
    gaps, last = [], None
    for _, _event in zip(range(4), events(port), strict=False):
        now = time.monotonic()
        gaps += [] if last is None else [now - last]
        last = now
    # The least gap: others may be longer, where the machine is busy.
    assert max(limits) + min(gaps) < 2


# What viewers do ----------------------------------------------------------------


def token_of(port: int) -> dict[str, str]:
    """The header that a POST needs."""
    return {"x-lifecycle-token": next(events(port))["token"]}


def test_cancels_request(port: int) -> None:
    """The button ends the request, whose client gets an answer."""
    with asked(port, "/slow") as connection:
        shown = wait_row(port, "/slow", cancellable=True)
        assert post(port, "cancel", shown["id"], **token_of(port)).status_code == 200
        connection.settimeout(60)
        assert connection.recv(100).startswith(b"HTTP/1.1 499")


def test_cancels_session_and_says_what_holds_its_bytes(port: int) -> None:
    """Payloads of a session count, their holders have names, and cancelling stops it."""
    with asked(port, "/session") as connection:
        shown = wait_row(port, "/session", session="mine", bytes=2 * 2**20)
        headers = token_of(port)
        holders = post(port, "holders", "mine", **headers)
        assert holders.status_code == 200
        assert list(holders.json()) == ["payload of 2097152 bytes"]
        assert post(port, "holders", "mine", **headers).status_code == 429
        assert post(port, "cancel", shown["session"], **headers).status_code == 200
        connection.settimeout(60)
        assert connection.recv(100)


def test_refuses_post_from_elsewhere(port: int) -> None:
    """Without the token, or with the origin of another site, nothing is cancelled."""
    with asked(port, "/slow"):
        id_ = wait_row(port, "/slow", cancellable=True)["id"]
        good = token_of(port)
        assert post(port, "cancel", id_).status_code == 403
        bad = {"x-lifecycle-token": "guess"}
        assert post(port, "cancel", id_, **bad).status_code == 403
        evil = {**good, "origin": "http://evil.example"}
        assert post(port, "cancel", id_, **evil).status_code == 403
        own = {**good, "origin": f"http://127.0.0.1:{port}"}
        assert post(port, "cancel", "no-such-id", **own).status_code == 404
        assert post(port, "cancel", id_, **own).status_code == 200


def test_shows_page_with_strict_policy(port: int) -> None:
    """The page runs its own script and no other, and no other site can frame it."""
    answer = httpx2.get(f"http://127.0.0.1:{port}/_lifecycle", timeout=60)
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    assert "http" not in answer.text.replace("http-equiv", "")  # nothing from elsewhere
    # A path alone would have the password of http://me:KEY@HOST/_lifecycle, which
    # browsers take for no request of a page.
    assert "const base = location.origin + location.pathname" in answer.text
    assert httpx2.post(answer.url, timeout=60).status_code == 405
    snapshot = httpx2.get(f"{answer.url}/snapshot", timeout=60).json()
    assert {"requests", "gates", "clients", "warnings"} <= snapshot.keys()


@pytest.mark.parametrize(
    ("client", "headers", "local"),
    [
        ("127.0.0.1", [(b"host", b"localhost:8000")], True),
        ("127.0.0.1", [(b"host", b"127.0.0.1")], True),
        ("::1", [(b"host", b"[::1]:8000")], True),
        ("::ffff:127.0.0.1", [(b"host", b"localhost")], True),
        ("10.0.0.7", [(b"host", b"localhost")], False),
        ("127.0.0.1", [(b"host", b"evil.example")], False),
        ("127.0.0.1", [(b"host", b"127.0.0.1.evil.example")], False),
        ("127.0.0.1", [], False),
        ("127.0.0.1", [(b"host", b"localhost"), (b"host", b"x")], False),
        (
            "127.0.0.1",
            [(b"host", b"localhost"), (b"x-forwarded-for", b"10.0.0.7")],
            False,
        ),
    ],
)
def test_lets_local_clients_look(client: str, headers: Any, local: bool) -> None:
    """By default, only clients of this machine look, and not through a proxy."""
    scope = http_scope(client=(client, 1), headers=headers)
    assert local_client(scope) is local


async def ask(app: Any, path: str, **changes: Any) -> ScriptedServer:
    """One request to the view."""
    server = ScriptedServer()
    await app(http_scope(path, **changes), server.receive, server.send)
    return server


@pytest.mark.anyio
async def test_answers_only_clients_that_are_allowed() -> None:
    """`allow` decides for every path of the view, and for no other."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    closed = LiveView(app, allow=lambda scope: False)
    for path in ("", "/", "/events", "/snapshot", "/cancel", "/holders"):
        server = await ask(closed, f"/_lifecycle{path}", method="GET")
        assert server.status == 403
        assert b"requests" not in server.body
    assert (await ask(closed, "/_lifecycle/status")).status == 204
    away = LiveView(app, path="/ops/live", allow=lambda scope: True)
    assert (await ask(away, "/ops/live/snapshot", method="GET")).status == 200
    assert (await ask(away, "/_lifecycle/snapshot", method="GET")).status == 204
    with pytest.raises(ValueError, match="slash"):
        LiveView(app, path="live/")


def signed(scheme: bytes, text: bytes) -> list[tuple[bytes, bytes]]:
    """Headers of a viewer that has a key."""
    return [(b"authorization", scheme + b" " + text)]


@pytest.mark.anyio
async def test_shows_and_cancels_for_those_who_have_a_key() -> None:
    """A key counts from anywhere, and an address of this machine for nothing."""
    view = LiveView(plain_app, keys=["first", "second"], cancel=True)
    given: list[tuple[list[tuple[bytes, bytes]], int]] = [
        ([(b"host", b"127.0.0.1")], 401),
        (signed(b"Bearer", b"third"), 401),
        (signed(b"Basic", b64encode(b"me:third")), 401),
        (signed(b"Basic", b"first"), 401),
        (signed(b"Bearer", b"first"), 200),
        (signed(b"basic", b64encode(b"me:second")), 200),
        ([(b"x-api-key", b"second")], 200),
    ]
    for headers, status in given:
        scope: dict[str, Any] = {"headers": headers, "client": ("127.0.0.1", 1)}
        for path in ("", "/snapshot"):
            server = await ask(view, f"/_lifecycle{path}", method="GET", **scope)
            assert server.status == status, (headers, path)
            asked = dict(server.sent[0]["headers"]).get(b"www-authenticate")
            assert asked == (b'Basic realm="lifecycle"' if status == 401 else None)
    seen = await ask(view, "/_lifecycle/snapshot", method="GET", **scope)
    token = (b"x-lifecycle-token", json.loads(seen.body)["token"].encode())
    refused = await ask(view, "/_lifecycle/cancel", headers=[token])
    assert refused.status == 401
    allowed = await ask(view, "/_lifecycle/cancel", headers=[token, *headers])
    assert allowed.status == 404  # there is no such request


def test_cancels_for_no_address() -> None:
    """Behind a proxy on the same machine, every client has one of this machine."""
    with pytest.raises(ValueError, match="proxy; add keys"):
        LiveView(plain_app, cancel=True)
    with pytest.raises(ValueError, match="both given"):
        LiveView(plain_app, keys=["key"], allow=local_client)
    with pytest.raises(ValueError, match="a key is empty"):
        LiveView(plain_app, keys=[""])
    with pytest.raises(TypeError, match="several keys"):
        LiveView(plain_app, keys="key")


@pytest.mark.anyio
async def test_cancels_nothing_by_default() -> None:
    """Cancelling is an option that is off."""
    view = LiveView(plain_app, allow=lambda scope: True)
    seen = await ask(view, "/_lifecycle/snapshot", method="GET")
    about = json.loads(seen.body)
    assert about["cancel"] is False
    headers = [(b"x-lifecycle-token", about["token"].encode())]
    server = await ask(view, "/_lifecycle/cancel", headers=headers)
    assert server.status == 403
    assert b"cancel=True" in server.body


async def plain_app(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


@pytest.mark.anyio
async def test_forgets_requests_that_have_ended() -> None:
    """What has ended is shown no more, however it ended, nor are gates that are gone."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        (await gate.admit(bytes=3)).release()
        raise KeyError(CANARY)

    gate = Gate(bytes=10, name="mine")
    view = LiveView(LifecycleMiddleware(fails), allow=lambda scope: True)
    scope = http_scope("/x")
    server = ScriptedServer()
    with pytest.raises(KeyError):
        await view(scope, server.receive, server.send)
    assert "lifecycle.live" not in scope
    assert owner.get() is None  # the task may serve the next request
    shown = json.loads((await ask(view, "/_lifecycle/snapshot", method="GET")).body)
    assert shown["total"] == 0
    assert [each["name"] for each in shown["gates"]] == ["mine"]


@pytest.mark.anyio
async def test_a_queue_ages_while_someone_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two looks that are a minute apart it may have been empty."""
    now, found = 0.0, []
    clocks = SimpleNamespace(monotonic=lambda: now, thread_time=lambda: 0.0)
    monkeypatch.setattr("lifecycle_asgi.live_snapshot.time", clocks)
    gate = Gate(slots=1, name="one")
    view = LiveView(plain_app, allow=lambda scope: True, gates=[gate])
    async with anyio.create_task_group() as tasks:
        with gate.try_admit():
            tasks.start_soon(gate.admit)
            while not gate.statistics().waiting:
                await anyio.lowlevel.checkpoint()
            for now in (1000.0, 1002.0, 1060.0, 1061.0):  # noqa: B007 - for the clock
                shown = await ask(view, "/_lifecycle/snapshot", method="GET")
                found.append(json.loads(shown.body)["gates"][0]["waiting_s"])
            tasks.cancel_scope.cancel()
    assert found == [0, 2, 0, 1]


@pytest.mark.anyio
async def test_lists_clients_by_bytes_held() -> None:
    """Clients are listed by the bytes that they hold together."""
    gate = Gate(bytes=1000, name="mine")
    go = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with await gate.admit(bytes=int(scope["path"][1:])):
            await go.wait()
        await plain_app(scope, receive, send)

    view = LiveView(LifecycleMiddleware(app), allow=lambda scope: True)
    async with anyio.create_task_group() as tasks:
        for size, host in ((300, "10.0.0.7"), (200, "10.0.0.8"), (200, "10.0.0.8")):
            client = (host, 1)
            scope = http_scope(f"/{size}", client=client)
            server = ScriptedServer()
            tasks.start_soon(view, scope, server.receive, server.send)
        while gate.statistics().slots_in_use < 3:
            await anyio.lowlevel.checkpoint()
        shown = json.loads((await ask(view, "/_lifecycle/snapshot", method="GET")).body)
        go.set()
    assert shown["clients"] == [
        {"client": "10.0.0.8", "requests": 2, "bytes": 400},
        {"client": "10.0.0.7", "requests": 1, "bytes": 300},
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("identity", "name"),
    [
        (client_address, "10.0.0.7"),
        (ClientIdentity(["secret"]), "key "),
        (lambda scope: "team a", "team a"),
        (lambda scope: b"", "unknown"),
        (lambda scope: bytes.fromhex("20010db800000000"), "2001:db8::/64"),
    ],
)
async def test_names_clients_without_their_keys(identity: Any, name: str) -> None:
    """A client is shown by its address, or by part of a hash of its key."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        shown.append((await ask(view, "/_lifecycle/snapshot", method="GET")).body)
        await plain_app(scope, receive, send)

    shown: list[bytes] = []
    view = LiveView(app, allow=lambda scope: True, client=identity)
    headers = [(b"authorization", b"Bearer secret")]
    await ask(view, "/x", client=("10.0.0.7", 1), headers=headers)
    (row,) = json.loads(shown[0])["requests"]
    assert row["client"].startswith(name)
    assert len(row["client"]) <= max(len(name), 12)
    assert b"secret" not in shown[0]


@pytest.mark.anyio
async def test_warns_of_no_bytes_that_are_held_on_purpose() -> None:
    """With ``release="end"``, `Admission` holds them while the response streams."""
    shown: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part = {"type": "http.response.body", "body": b"part"}
        await send({**part, "more_body": True})
        shown.append((await ask(view, "/_lifecycle/snapshot", method="GET")).body)
        await send(part)

    limits = WarningLimits(held_s=0.0, held_bytes=1)
    admission = Admission(app, bytes=2**30, release="end", environment={})
    view = LiveView(admission, allow=lambda scope: True, limits=limits)
    await ask(view, "/x")
    (found,) = json.loads(shown[0])["requests"]
    assert found["bytes"] > 0
    assert found["warnings"] == []


# The warnings, without a server -------------------------------------------------


def a_request(**changes: Any) -> RequestView:
    """A request that is as it should be."""
    fine: dict[str, Any] = {
        "id": "a",
        "client": "c",
        "phase": "running",
        "phase_s": 1.0,
        "age_s": 1.0,
    }
    return RequestView(**{**fine, **changes})


def a_gate(**changes: Any) -> GateView:
    """A gate that is half full."""
    fine: dict[str, Any] = {
        "name": "g",
        "slots": None,
        "slots_in_use": 1,
        "bytes": 100,
        "bytes_in_use": 50,
        "waiting": 0,
        "max_waiting": None,
        "refused": 0,
        "waiting_s": 0.0,
    }
    return GateView(**{**fine, **changes})


@pytest.mark.parametrize(
    ("request_", "kinds"),
    [
        (a_request(), []),
        (a_request(gone_s=0.4, bytes=2**20), []),
        (a_request(gone_s=0.6), ["work after its client left"]),
        (a_request(phase="streaming", first_s=9.0), []),
        (a_request(phase="streaming", first_s=0.4, bytes=2**20), []),
        (
            a_request(phase="streaming", first_s=0.6, bytes=2**20),
            ["payload held after hand-off"],
        ),
        (a_request(phase="streaming", first_s=0.6, bytes=100), []),
        (
            a_request(phase="streaming", first_s=0.6, bytes=2**20, keeps_bytes=True),
            [],
        ),
        (a_request(sending_s=0.4), []),
        (a_request(sending_s=0.6), ["reader behind"]),
        (a_request(phase_s=59.0), []),
        (a_request(phase_s=61.0), ["overdue"]),
        (a_request(phase="streaming", phase_s=61.0, first_s=61.0), []),
        (a_request(gives_up_s=2.0), []),
        (a_request(gives_up_s=0.9), ["overdue"]),
        (
            a_request(gone_s=1.0, sending_s=1.0),
            ["work after its client left", "reader behind"],
        ),
    ],
)
def test_warns_of_requests(request_: RequestView, kinds: list[str]) -> None:
    """A warning begins at its limit, and not before."""
    found = find_warnings([request_], [], None, WarningLimits())
    assert [each.kind for each in found] == kinds
    assert {each.subject for each in found} <= {"a"}


UNHELD = "no request that is live here holds 50 B"


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        (a_gate(), []),
        (a_gate(waiting=1, waiting_s=0.4), []),
        (
            a_gate(waiting=2, waiting_s=0.6),
            ["2 requests wait at gate 'g' at 50 B of 100 B", "c holds most, 40 B"],
        ),
        (
            a_gate(waiting=1, waiting_s=0.6, slots=8, slots_in_use=5, bytes=None),
            ["1 request waits at gate 'g' at 5 of 8 slots", "c holds most, 5 slots"],
        ),
        (
            a_gate(waiting=1, waiting_s=0.6, slots=5, slots_in_use=5),
            [
                "1 request waits at gate 'g' at 5 of 5 slots and 50 B of 100 B",
                "c holds most, 5 slots",
            ],
        ),
        (
            a_gate(waiting=1, waiting_s=0.6, slots=5, slots_in_use=5, bytes_in_use=100),
            [
                "1 request waits at gate 'g' at 5 of 5 slots and 100 B of 100 B",
                "c holds most, 40 B",
                UNHELD,
            ],
        ),
        (
            a_gate(name="other", waiting=1, waiting_s=0.6),
            ["1 request waits at gate 'other' at 50 B of 100 B", UNHELD],
        ),
        (
            a_gate(name="other", waiting=1, waiting_s=0.6, slots=0, slots_in_use=0),
            [
                "1 request waits at gate 'other' at 0 of 0 slots and 50 B of 100 B",
                UNHELD,
            ],
        ),
    ],
)
def test_warns_of_gates(gate: GateView, told: list[str]) -> None:
    """A gate binds once there is always a request in its queue, and names its holder."""
    requests = [
        a_request(bytes=90, holds={"g": (3, 30)}),
        a_request(id="b", holds={"g": (2, 10)}),
        a_request(client="d", holds={"g": (0, 10)}),
    ]
    found = find_warnings(requests, [gate], None, WarningLimits())
    assert [each.text for each in found] == ["; ".join(told)] * bool(told)


def test_warns_of_a_full_engine() -> None:
    """Once a request has waited long enough for a place in the batch."""
    young, old = (
        [a_request(phase="queued", phase_s=each) for each in (0.2, longest)]
        for longest in (0.4, 0.6)
    )
    assert find_warnings(young, [], None, WarningLimits()) == []
    (found,) = find_warnings(old, [], None, WarningLimits())
    assert (found.kind, found.subject) == ("engine full", "engine")
    assert found.text == (
        "2 requests wait for a place in the engine's batch, one of them for 0.6 s"
    )


@pytest.mark.parametrize(
    ("health", "seconds", "warned"),
    [
        ("serving", 9.0, False),
        ("starting", 9.0, False),
        ("busy", 0.4, False),
        ("busy", 0.6, True),
        ("stopped", 0.0, True),
        ("restarting", 0.0, True),
        ("draining", 9.0, False),
    ],
)
def test_warns_of_engine(health: str, seconds: float, warned: bool) -> None:
    """An engine is slow once it is not serving for a while."""
    engine = EngineView(health, seconds, 1)
    found = find_warnings([], [], engine, WarningLimits())
    assert bool(found) is warned
