"""The server in a thread of this process, spoken to by a bare socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from zmq_wire import Kind, wire

from lifecycle_zmq import EngineServer, Finish, Output, RequestRejected

pytestmark = pytest.mark.usefixtures("no_leaks")


CONTROL: dict[str, Any] = {"start": [], "cancel": [], "grant": [], "end": []}


class ListBackend:
    """Produces what the test has put on its list, one tick an entry."""

    def __init__(self) -> None:
        self.ticks: list[list[Output] | Exception] = []
        self.calls: list[str] = []
        self.odd_status = False

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> None:
        """Take anything but ``no``; ticks start to flow with the stream ``go``."""
        self.calls.append(f"start {key}")
        if key == "no":
            raise RequestRejected("no", "no")

    def cancel(self, key: str) -> None:
        """Note the call."""
        self.calls.append(f"cancel {key}")

    def end(self, key: str) -> None:
        """Note the call."""
        self.calls.append(f"end {key}")

    def step(self) -> Sequence[Output]:
        """Play the next tick."""
        tick = self.ticks.pop(0)
        if isinstance(tick, Exception):
            raise tick
        return tick

    @property
    def busy(self) -> bool:
        """Whether there is a tick to play, once ``go`` was started."""
        return bool(self.ticks) and "start go" in self.calls

    def status(self) -> dict[str, Any]:
        """Return a set, which cannot be sent, on demand."""
        return {"odd": {1}} if self.odd_status else {}


class Served:
    """A server of incarnation 1 and the clients that a test opens."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.backend = ListBackend()
        self.error: BaseException | None = None
        self.server = EngineServer(
            endpoint, self.backend, incarnation=1, leave_with_parent=False
        )
        self.context = zmq.Context()
        self.clients: list[BareClient] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def client(self) -> BareClient:
        """Connect another client."""
        self.clients.append(BareClient(self.context, self.endpoint))
        return self.clients[-1]

    def stop(self) -> None:
        """Tell the server to leave, if it has not failed before."""
        if self.thread.is_alive():
            open_ = [it for it in self.clients if not (it.socket.closed or it.over)]
            (open_ or [self.client()])[0].say(Kind.SHUTDOWN, {})
        self.thread.join(20)
        for client in self.clients:
            client.socket.close(0)
        self.context.destroy(linger=0)
        assert not self.thread.is_alive()


class BareClient:
    """A DEALER that may say anything, and takes apart what it hears."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(endpoint)
        self.sent = 0
        self.over = False
        self.generation = 0
        self.keys: dict[int, str] = {}
        self.messages: list[wire.Message] = []
        self.unread: list[tuple[Any, ...]] = []

    def say(self, kind: Kind, body: dict[str, Any], **changes: int) -> None:
        """Send one message; `changes` forge its header."""
        header = {"incarnation": 1, "sequence": self.sent} | changes
        self.socket.send(wire.encode(kind, body, **header))
        self.sent += 1

    def ask(self, key: str, *, window: int = 2**16, **changes: int) -> None:
        """Ask for a stream."""
        self.generation += 1
        self.keys[self.generation] = key
        body = {"key": key, "window": window, "request": b"\x80", "tensors": []}
        header = {"generation": self.generation} | changes
        self.say(Kind.START, body, **header)

    def control(self, what: str, *keys: str) -> None:
        """Cancel or end streams."""
        self.say(Kind.CONTROL, CONTROL | {what: [self.number(key) for key in keys]})

    def grant(self, key: str, credit: int) -> None:
        """Give credit to a stream."""
        grant = [[self.number(key), credit]]
        self.say(Kind.CONTROL, CONTROL | {"grant": grant})

    def number(self, key: str) -> int:
        """The newest generation of a key, or one that was never used."""
        return max((n for n, it in self.keys.items() if it == key), default=999)

    def hear(self) -> tuple[Any, ...]:
        """Return what comes next, which must be soon."""
        while not self.unread:
            assert self.socket.poll(20_000)
            parts = self.socket.recv_multipart()
            message = wire.decode(parts, accept=wire.FROM_ENGINE)
            self.messages.append(message)
            self.over = self.over or message.kind is Kind.FAULT
            self.unread.extend(self._read(message))
        return self.unread.pop(0)

    def _read(self, message: wire.Message) -> Iterator[tuple[Any, ...]]:
        body = message.body
        if message.kind is not Kind.TICK:
            yield message.kind.name, body.get("status")
            return
        for generation in body["accepted"]:
            yield "ACCEPTED", self.keys[generation]
        for generation, code, _ in body["rejected"]:
            yield "REJECTED", self.keys[generation], code
        for generation, first, tokens in body["tokens"]:
            yield "CHUNK", self.keys[generation], first, [tokens], None
        for generation, first, items, finish in body["chunks"]:
            values = [item for item, _ in items]
            yield "CHUNK", self.keys[generation], first, values, finish
        for generation in body["done"]:
            yield "DONE", self.keys.get(generation, "")

    def start(self, key: str, *, window: int = 2**16) -> None:
        """Start a stream and hear that it was accepted."""
        self.ask(key, window=window)
        heard = self.hear()
        assert (heard if heard[0] != "READY" else self.hear()) == ("ACCEPTED", key)

    def status(self) -> dict[str, Any]:
        """Ask for the counters."""
        self.say(Kind.STATUS, {"ask": 1})
        while (heard := self.hear())[0] != "REPORT":
            pass
        status: dict[str, Any] = heard[1]
        return status

    def chunks(self, keys: int) -> dict[str, list[Any]]:
        """Collect items and finish of that many streams, checking the order."""
        items: dict[str, list[Any]] = {}
        while sum(it[-1:] == ["."] for it in items.values()) < keys:
            what, key, first, new, finish = self.hear()
            assert what == "CHUNK"
            mine = items.setdefault(key, [])
            assert first == len(mine)
            mine.extend(new)
            if finish is not None:
                code = finish.get("error", {}).get("code")
                mine.extend([code or finish["reason"], "."])
        return items


@pytest.fixture
def served(tmp_path: Path, no_leaks: None) -> Iterator[Served]:
    """A running server."""
    it = Served(f"ipc://{tmp_path}/served")
    yield it
    it.stop()


def _forge(**fields: Any) -> bytes:
    packed = fields.pop("packed")
    header = {
        "magic": wire.MAGIC,
        "version": wire.VERSION,
        "kind": Kind.CONTROL,
        "tensors": 0,
        "size": len(packed),
        "incarnation": 1,
        "generation": 0,
        "sequence": 0,
    } | fields
    return wire.seal([*header.values()], packed)


def _flipped(head: bytes) -> bytes:
    return head[:-1] + bytes((head[-1] ^ 1,))


START = msgpack.packb({"key": "x", "window": 1, "request": b"\x80", "tensors": []})
EMPTY = msgpack.packb(CONTROL)
BAD: dict[str, list[bytes]] = {
    "empty": [b""],
    "noise": [b"\x00" * 40],
    "pickle": [b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94."],
    "engine kind": [_forge(kind=Kind.READY, packed=b"\x80")],
    "no field": [_forge(packed=b"\x80")],
    "deep": [_forge(kind=Kind.START, generation=1, packed=b"\x91" * 5000)],
    "no generation": [_forge(kind=Kind.START, packed=START)],
    "generation": [_forge(generation=1, packed=EMPTY)],
    "flipped": [_flipped(_forge(kind=Kind.STATUS, packed=b"\x81\xa3ask\x01"))],
    "version 2": [_forge(version=2, packed=EMPTY)],
    "parts": [b"x"] * 5000,
    "tensors": [_forge(packed=EMPTY, tensors=1), b"x"],
}


@pytest.mark.parametrize("bad", BAD)
def test_server_ends_the_connection_of_a_bad_frame_alone(
    served: Served, bad: str
) -> None:
    """Its client is told so and loses its streams; others are served (`fault-43`, `peers-88`)."""
    good, other, fresh = served.client(), served.client(), served.client()
    good.start("a")
    other.start("b")
    for client in (other, fresh):
        client.socket.send_multipart(BAD[bad])
        assert client.hear()[0] == "FAULT"
    status = good.status()
    assert (status["bad_frames"], status["live"]) == (2, 1)
    assert served.backend.calls == ["start a", "start b", "end b"]
    # Whatever such a client says then, it is told again.
    other.ask("c")
    assert other.hear()[0] == "FAULT"
    assert good.status()["starts"] == 2


@pytest.mark.parametrize("incarnation", [0, 2])
def test_server_drops_what_is_for_another_incarnation(
    served: Served, incarnation: int
) -> None:
    """It is counted; its client was lost with the engine that it was for (`fault-46`)."""
    client = served.client()
    client.start("a")
    client.ask("b", incarnation=incarnation)
    client.sent -= 1
    assert client.status()["bad_frames"] == 1
    assert served.backend.calls == ["start a"]


def test_server_drops_a_message_that_comes_twice(served: Served) -> None:
    """A repeated number is dropped, so START and END act once (`fault-41`)."""
    client = served.client()
    client.start("a")
    client.ask("b", sequence=0)
    client.sent -= 1
    assert client.status()["bad_frames"] == 1
    assert served.backend.calls == ["start a"]


def test_server_refuses_a_start_that_comes_twice(served: Served) -> None:
    """A generation begins one stream; an older or equal one is a fault (`fault-41`)."""
    client = served.client()
    client.start("a")
    client.ask("b", generation=1)
    assert client.hear()[0] == "FAULT"
    assert served.backend.calls == ["start a", "end a"]


@pytest.mark.parametrize("numbers", [[1], [3, 2], [3, 3], [1, 4]])
def test_server_refuses_starts_that_are_not_numbered_upwards(
    served: Served, numbers: list[int]
) -> None:
    """Of starts that travel together none is believed if one is a repeat."""
    client = served.client()
    client.start("a")
    starts = [[number, f"b{at}", 1, b"\x80"] for at, number in enumerate(numbers)]
    client.say(Kind.CONTROL, CONTROL | {"start": starts})
    assert client.hear()[0] == "FAULT"
    assert served.backend.calls == ["start a", "end a"]


def test_server_takes_starts_that_travel_together(served: Served) -> None:
    """Each is taken or refused by itself, and read before what follows them."""
    client = served.client()
    keys = ("a", "no", "b", "a", "c")
    client.keys = dict(enumerate(keys, 1))
    starts = [[number, key, 100, b"\x80"] for number, key in client.keys.items()]
    fields = {"start": starts, "cancel": [1, 2], "end": [3, 4]}
    client.say(Kind.CONTROL, CONTROL | fields)
    assert client.hear()[0] == "READY"
    heard = [client.hear() for _ in range(7)]
    assert heard == [
        *(("ACCEPTED", key) for key in ("a", "b", "c")),
        ("REJECTED", "no", "no"),
        ("REJECTED", "a", "duplicate_key"),
        *(("DONE", key) for key in ("b", "a")),
    ]
    status = client.status()
    assert (status["live"], status["ends_of_refused"]) == (2, 1)


@pytest.mark.parametrize("first", [True, False])
def test_server_ends_the_connection_of_a_client_that_lost_a_message(
    served: Served, *, first: bool
) -> None:
    """Any stream may have been in it, so all of that client end (`fault-40`)."""
    client, other = served.client(), served.client()
    if not first:
        client.start("a")
    other.start("b")
    lost = client.sent
    client.sent += 1
    client.say(Kind.PING, {"ask": client.sent})
    assert client.hear()[0] == "FAULT"
    message = client.messages[-1].body["message"]
    assert message == f"message {lost + 1} instead of {lost}: one was lost"
    status = other.status()
    assert (status["bad_frames"], status["live"]) == (1, 1)


def test_server_answers_a_ping_in_order(served: Served) -> None:
    """What was sent before it is heard before its answer."""
    client = served.client()
    client.ask("a")
    client.say(Kind.PING, {"ask": client.sent})
    while client.hear()[0] != "PONG":
        pass
    said = [it.kind.name for it in client.messages]
    assert said == ["READY", "TICK", "PONG"]
    assert client.messages[-1].body == {"ask": 1}


def test_server_forgets_a_client_that_leaves(served: Served) -> None:
    """One that received a fault says so: its streams end at once."""
    client, other = served.client(), served.client()
    client.start("a")
    client.say(Kind.LEAVE, {"message": "message 3, not 2"})
    client.over = True
    while "end a" not in served.backend.calls:
        other.status()
    assert other.status()["lost_with_peer"] == 1


def test_server_counts_every_kind_of_end(served: Served) -> None:
    """Each END is answered; repeated and unstarted ones are counted apart."""
    client = served.client()
    client.start("a")
    client.ask("no")
    assert client.hear() == ("REJECTED", "no", "no")
    for key in ("a", "a", "never", "no"):
        client.control("end", key)
        assert client.hear()[0] == "DONE"
    status = client.status()
    assert (status["ends"], status["duplicate_ends"]) == (1, 1)
    assert (status["ends_before_start"], status["ends_of_refused"]) == (1, 1)
    assert served.backend.calls == ["start a", "start no", "end a"]


def test_server_refuses_a_key_in_use(served: Served) -> None:
    """Two live streams never share a key; the first is untouched (`peers-27`)."""
    client = served.client()
    client.start("a")
    client.ask("a")
    assert client.hear() == ("REJECTED", "a", "duplicate_key")
    assert served.backend.calls == ["start a"]


def test_server_keeps_clients_apart(served: Served) -> None:
    """A client can neither cancel nor end what another has started."""
    one, two = served.client(), served.client()
    one.start("a")
    two.ask("no")  # under the number that the other's stream has
    assert [two.hear()[0], two.hear()[0]] == ["READY", "REJECTED"]
    two.start("b")
    for what in ("cancel", "end"):
        two.control(what, "no")
    assert two.hear() == ("DONE", "no")
    assert two.status()["live"] == 2
    assert served.backend.calls == ["start a", "start no", "start b"]


def test_server_ends_the_streams_of_a_client_that_left(served: Served) -> None:
    """The first message that cannot be delivered releases all of that client's (`S4`)."""
    gone, stays = served.client(), served.client()
    gone.start("a")
    gone.start("b")
    stays.start("c")
    gone.socket.close(0)
    ticks = 0
    while stays.status()["live"] > 1:
        ticks += 1
        served.backend.ticks.append([Output("a", [ticks])])
        if ticks == 1:
            stays.start("go")
            stays.control("end", "go")
            assert ticks < 10_000
    status = stays.status()
    assert (status["live"], status["lost_with_peer"]) == (1, 2)
    assert {"end a", "end b"} <= set(served.backend.calls)
    assert "end c" not in served.backend.calls


def test_server_puts_a_tick_of_all_streams_into_one_message(served: Served) -> None:
    """One message per tick and client; streams already ended are left out."""
    client = served.client()
    client.start("a")
    client.start("b")
    client.control("end", "b")
    assert client.hear() == ("DONE", "b")
    tick = [
        Output("a", [1], None),
        Output("b", [1], None),
        Output("go", (2, 3), Finish("completed")),
        Output("go", [4], None),
        Output("a", [5], Finish("cancelled")),
        Output("nobody", [6], None),
    ]
    served.backend.ticks.append(tick)
    client.start("go")
    assert [client.hear() for _ in range(3)] == [
        ("CHUNK", "a", 0, [1], None),
        ("CHUNK", "go", 0, [2, 3], {"reason": "completed"}),
        ("CHUNK", "a", 1, [5], {"reason": "cancelled"}),
    ]
    assert not client.unread


def test_server_splits_a_tick_that_is_too_large(served: Served) -> None:
    """More than one message can hold travels in several, in order (`fault-44`)."""
    client = served.client()
    for key in "abc":
        client.start(key, window=2**20)
    big = b"x" * 100_000
    tick = [Output(key, [big] * 7, Finish("completed")) for key in "abc"]
    served.backend.ticks.append(tick)
    client.start("go")
    items = client.chunks(3)
    assert items == {key: [big] * 7 + ["completed", "."] for key in "abc"}


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        (object(), "unencodable"),
        ({1: 2}, "unencodable"),
        (2**80, "unencodable"),
        (b"x" * 300_000, "too_large"),
    ],
    ids=["object", "int key", "int", "bytes"],
)
def test_server_fails_only_the_stream_of_an_item_that_cannot_be_sent(
    served: Served, odd: Any, code: str
) -> None:
    """An invalid item ends its own stream with a code; the others continue."""
    client = served.client()
    client.start("a")
    client.start("b")
    first = [Output("a", [1, odd, 2, 3]), Output("b", [1])]
    second = [Output("a", [4]), Output("b", [2], Finish("completed"))]
    served.backend.ticks.extend([first, second])
    client.start("go")
    items = client.chunks(2)
    assert items["b"] == [1, 2, "completed", "."]
    assert items["a"] == [1, code, "."]
    assert "cancel a" in served.backend.calls


def test_server_fails_all_streams_when_a_step_raises(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each stream fails, all is released, the engine continues (`fault-28`)."""
    client = served.client()
    client.start("a")
    served.backend.ticks.extend([RuntimeError("canary"), [Output("b", [1])]])
    client.start("go")
    assert client.chunks(2) == {key: ["step_failed", "."] for key in ("a", "go")}
    assert {"end a", "end go"} <= set(served.backend.calls)
    client.start("b")
    assert client.status()["live"] == 3
    said = capfd.readouterr().err
    assert "RuntimeError" in said
    assert "canary" not in said


def test_server_gives_up_when_every_step_raises(served: Served) -> None:
    """A backend that does not recover ends the process, which is restarted."""
    served.backend.ticks.extend([RuntimeError("again")] * 3)
    served.client().start("go")
    served.thread.join(20)
    assert isinstance(served.error, RuntimeError)


def test_server_shortens_long_refusals_and_failures(served: Served) -> None:
    """What a backend says is cut to the limits, not refused."""
    client = served.client()
    client.start("a")
    finish = Finish("failed", "c" * 100, "m" * 10_000)
    served.backend.ticks.append([Output("a", [], finish)])
    client.start("go")
    error = client.hear()[4]["error"]
    assert (len(error["code"]), len(error["message"])) == (64, 4096)


def test_server_tells_what_no_message_can_carry_as_well_as_it_can(
    served: Served,
) -> None:
    """Half a character in a reason, or a number for it, ends no other stream."""
    client = served.client()
    client.start("a")
    odd: Any = 5
    served.backend.ticks.append([Output("a", [], Finish("failed", odd, "\ud800!"))])
    client.start("go")
    assert client.hear()[4]["error"] == {"code": "5", "message": "?!"}


def test_server_reports_a_status_that_cannot_be_sent(served: Served) -> None:
    """An odd status of the backend leaves the server's own counters readable."""
    served.backend.odd_status = True
    status = served.client().status()
    assert status["backend"] == {"error": "unencodable"}


def test_server_forgets_idle_clients_for_new_ones(served: Served) -> None:
    """Any number may come and go; those with streams are kept (`fault-49`)."""
    kept = served.client()
    kept.start("a")
    for _ in range(80):
        passing = served.client()
        passing.status()
        passing.socket.close(0)
    kept.start("b")
    assert kept.status()["live"] == 2


def test_server_leaves_an_address_to_its_first_owner(served: Served) -> None:
    """A second client with the name of the first is ignored (`fault-49`)."""
    first, second = served.client(), served.client()
    endpoint = served.endpoint
    for client in (first, second):
        client.socket.disconnect(endpoint)
        client.socket.setsockopt(zmq.ROUTING_ID, b"same")
    first.socket.connect(endpoint)
    first.start("a")
    second.socket.connect(endpoint)
    second.ask("b")
    second.control("end", "a")
    assert not second.socket.poll(200)
    first.start("c")
    status = first.status()
    assert (status["live"], status["starts"], status["bad_frames"]) == (2, 2, 0)
    assert not second.socket.poll(0)


def test_server_refuses_clients_beyond_its_limit(served: Served) -> None:
    """When all places are held by clients with streams, one more is told so."""
    clients = [served.client() for _ in range(64)]
    for number, client in enumerate(clients):
        client.start(f"s{number}")
    late = served.client()
    late.say(Kind.STATUS, {"ask": 1})
    assert late.hear()[0] == "FAULT"
    assert "64 clients" in late.messages[-1].body["message"]
    assert clients[0].status()["bad_frames"] == 1


def test_server_shuts_down_on_request(tmp_path: Path) -> None:
    """SHUTDOWN ends `run`, also with a stream that is live."""
    it = Served(f"ipc://{tmp_path}/served")
    it.client().start("a")
    it.stop()
    assert it.error is None
