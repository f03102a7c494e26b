"""Credit, send queues, slow readers, and the ends of streams."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import msgpack
import pytest

from lifecycle import Payload
from lifecycle_zmq import (
    Arena,
    EncodeError,
    EngineClient,
    EngineFailed,
    EngineLoop,
    Finish,
    Output,
    ProtocolError,
    protocol as wire,
)
from lifecycle_zmq.client import SMALL_REQUEST, ControlBatch, Sender
from lifecycle_zmq.client_streams import (
    EngineStream,
    StatusReply,
    StreamState,
    StreamTable,
)
from lifecycle_zmq.codec import pack_item, pack_request, unpack_item, unpack_tokens
from lifecycle_zmq.flow_control import (
    FlowController,
    Peer,
    SendQueue,
    ServedStream,
    ServerState,
)
from lifecycle_zmq.protocol import Kind, Message
from lifecycle_zmq.server import ArenaLeases, EndHandler, StartHandler

DONE = Finish("completed")


HOLD = 4096


class Recorder:
    """A backend of which only the calls are of interest."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[[str], None]:
        if name.startswith("_") or name in {"pause", "resume"}:
            raise AttributeError(name)
        return lambda key: self.calls.append(f"{name} {key}")


class Pausable(Recorder):
    """A backend that can also be paused."""

    def pause(self, key: str) -> None:
        """Note the call."""
        self.calls.append(f"pause {key}")

    def resume(self, key: str) -> None:
        """Note the call."""
        self.calls.append(f"resume {key}")


class Rig:
    """A delivery without a socket, for one client with streams ``a`` and ``b``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        backend: Any,
        *,
        merge: Any = "never",
        credit: int = 100,
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.backend = backend
        self.state = ServerState()
        self.peer = self.state.peers[b"p"] = Peer(b"p")
        self.flushed: list[dict[str, Any]] = []
        self.delivery = FlowController(
            self.state, self.backend, self._flush, hold=HOLD, stall=30.0
        )
        self.a = self._start("a", 1, merge, credit)
        self.b = self._start("b", 2, merge, 10**6)

    def _start(self, key: str, generation: int, merge: Any, credit: int) -> Any:
        stream = ServedStream(key, generation, self.peer, credit, merge)
        self.state.started(stream)
        return stream

    def _flush(self, peer: Peer) -> None:
        self.flushed.append(peer.batch.take())

    def produce(
        self, *items: Any, key: str = "a", finish: Finish | None = None
    ) -> None:
        """Let the backend produce items for one stream in one step."""
        self.delivery.publish([Output(key, list(items), finish)])

    def said(self, generation: int = 1) -> list[Any]:
        """Return what the client received about a stream since the last call, in order."""
        self._flush(self.peer)
        said: list[Any] = []
        for body in self.flushed:
            lists = unpack_tokens(body["tokens"])
            said += [tokens for number, _, tokens in lists if number == generation]
            for number, _, items, finish in body["chunks"]:
                if number == generation:
                    said += map(unpack_item, items)
                    said += [] if finish is None else [_end(finish)]
        self.flushed.clear()
        return said


def _end(finish: dict[str, Any]) -> str:
    code: str = finish.get("error", {}).get("code") or finish["reason"]
    return code


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """Make a rig; by default its backend cannot pause."""
    return lambda backend=None, **options: Rig(
        monkeypatch, backend or Recorder(), **options
    )


def test_items_are_kept_apart_while_there_is_credit(rig: Any) -> None:
    """Nothing is merged for a reader that keeps up, whatever the rule is."""
    it = rig(merge="concatenate", credit=10**6)
    for number in range(50):
        it.produce([number])
    assert it.said() == [[number] for number in range(50)]


def test_lists_are_concatenated_while_there_is_none(rig: Any) -> None:
    """Tokens without credit become one list; it is sent with the next credit."""
    it = rig(merge="concatenate")
    for number in range(500):
        it.produce([number, number])
    assert it.said() == [[0, 0], [1, 1]]
    it.delivery.grant(it.a, 1000)
    assert it.said() == [[n // 2 for n in range(4, 1000)]]


def test_other_neighbours_stay_apart_under_concatenation(rig: Any) -> None:
    """Only lists join; what comes between two of them stays between them."""
    it = rig(merge="concatenate", credit=1)
    for item in ([1], [2], [3], {"x": 1}, ["p"], [4], ["q"], "s", [5], [[6]], []):
        it.produce(item)
    assert it.said() == [[1]]
    it.delivery.grant(it.a, 10**6)
    wanted = [[2, 3], {"x": 1}, ["p", 4, "q"], "s", [5, [6]]]
    assert it.said() == wanted


def test_the_latest_replaces_what_is_held(rig: Any) -> None:
    """Under "replace" one item waits, the latest; the end comes after it."""
    it = rig(merge="replace", credit=1)
    for number in range(100):
        it.produce({"progress": number})
    it.produce([7])
    it.produce({"progress": 100}, finish=DONE)
    assert it.said() == [{"progress": 0}]
    it.delivery.grant(it.a, 100)
    assert it.said() == [{"progress": 100}, "completed"]


def test_held_items_never_merge_under_never(rig: Any) -> None:
    """Kept apart they come as they were, in order, as far as credit goes."""
    it = rig(credit=1)
    items = [[1], "x", [2, 3], {"y": [None]}]
    it.produce(*items, finish=DONE)
    assert it.said() == [[1]]
    it.delivery.grant(it.a, 67)
    assert it.said() == []  # the item before took more than there was
    it.delivery.grant(it.a, 1)
    assert it.said() == ["x"]
    it.delivery.grant(it.a, 10**6)
    assert it.said() == [[2, 3], {"y": [None]}, "completed"]


def test_slow_reader_stops_only_its_own_stream(rig: Any) -> None:
    """Beside a reader without credit another gets all of its items at once."""
    it = rig(credit=1)
    for number in range(20):
        it.produce([number])
        it.produce([number], key="b")
    assert it.said(2) == [[number] for number in range(20)]
    assert it.backend.calls == []


def test_reader_too_far_behind_ends_as_slow_client(rig: Any) -> None:
    """Beyond the bytes to hold, the stream ends: failed once, cancelled once."""
    it = rig(credit=1)
    for number in range(100):
        it.produce([number])
    assert it.said() == [[0], "slow_client"]
    assert it.backend.calls == ["cancel a"]
    it.produce(finish=Finish("cancelled"))
    it.delivery.grant(it.a, 10**6)
    assert it.said() == []
    assert it.state.counters()["slow_clients"] == 1
    assert it.delivery.next_timeout() is None


def test_reader_that_takes_nothing_ends_after_the_stall_limit(rig: Any) -> None:
    """The limit counts from the last credit; an end that waits ends likewise."""
    it = rig(merge="concatenate", credit=1)
    it.produce([1], [2])
    it.now = 29.0
    it.delivery.expire()
    assert it.delivery.next_timeout() == 1.0
    it.delivery.grant(it.a, 68)
    assert (it.said(), it.delivery.next_timeout()) == ([[1], [2]], None)
    it.produce([3], [4], finish=DONE)
    it.produce([1])
    it.now = 58.9
    it.delivery.expire()
    assert it.said() == []
    it.now = 59.1
    it.delivery.expire()
    assert it.said() == ["slow_client"]
    # Its backend had finished it: a key that is unknown there is not cancelled.
    assert it.backend.calls == []
    assert it.delivery.next_timeout() is None


def test_slow_but_moving_reader_is_kept(rig: Any) -> None:
    """Some credit now and then is progress; each time the limit begins anew."""
    it = rig(credit=1)
    it.produce(*[[number] for number in range(10)])
    for _ in range(8):
        it.now += 29.0
        it.delivery.expire()
        it.delivery.grant(it.a, 68)
    assert it.said() == [[number] for number in range(9)]
    assert it.backend.calls == []


def test_outputs_of_one_step_are_queued_whole(rig: Any) -> None:
    """A burst of one step is no slow reader; only the next step is too much."""
    it = rig()
    it.produce(*["x" * 100] * 100)
    assert len(it.said()) == 1
    it.delivery.grant(it.a, 10**6)
    assert len(it.said()) == 99
    assert it.backend.calls == []


def test_backend_that_can_pause_is_paused_and_resumed(rig: Any) -> None:
    """Half-way to the limit the backend is paused, and resumed later."""
    it = rig(Pausable(), credit=1)
    for number in range(31):
        it.produce([number])
        assert it.backend.calls == []
    it.produce([31])
    it.produce([32])
    assert it.backend.calls == ["pause a"]
    it.delivery.grant(it.a, 10 * 68)
    assert it.backend.calls == ["pause a"]
    it.delivery.grant(it.a, 10**6)
    assert it.backend.calls == ["pause a", "resume a"]
    assert it.said() == [[number] for number in range(33)]


@pytest.mark.parametrize("how", ["cancel", "stall", "forget", "finish"])
def test_paused_stream_can_end_in_every_way(rig: Any, how: str) -> None:
    """It is resumed before it is cancelled, and not once it has finished."""
    it = rig(Pausable(), credit=1)
    it.produce(*[[number] for number in range(50)])
    assert it.backend.calls.pop() == "pause a"
    if how == "finish":
        it.produce(finish=DONE)
        it.delivery.grant(it.a, 10**6)
        assert it.said()[-1] == "completed"
    elif how == "stall":
        it.now = 31.0
        it.delivery.expire()
        assert it.said() == [[0], "slow_client"]
    else:
        getattr(it.delivery, how)(it.a)
        assert it.said() == [[0]]
    running = how in {"cancel", "stall"}
    assert it.backend.calls == (["resume a", "cancel a"] if running else [])
    assert it.delivery.next_timeout() is None


def test_cancel_drops_what_is_held_and_tells_the_end_that_waited(rig: Any) -> None:
    """A client that cancels wants no more items, but one end."""
    it = rig(credit=1)
    it.produce([1], [2], finish=DONE)
    it.delivery.cancel(it.a)
    it.delivery.cancel(it.a)
    assert it.said() == [[1], "completed"]
    assert it.backend.calls == []


def test_items_behind_a_chunk_of_the_same_stream_stay_behind_it(rig: Any) -> None:
    """Token lists are read first, so after a chunk they travel as chunks."""
    it = rig(credit=10**6)
    it.produce([1], {"x": 1}, [2])
    it.produce([3])
    it.produce([1], [2], key="b")
    batch = it.peer.batch.take()
    assert unpack_tokens(batch["tokens"]) == [(1, 0, [1]), (2, 0, [1]), (2, 1, [2])]
    ((generation, first, items, finish),) = batch["chunks"]
    assert (generation, first, finish) == (1, 1, None)
    assert list(map(msgpack.unpackb, items)) == [{"x": 1}, [2], [3]]
    it.produce([4])
    assert unpack_tokens(it.peer.batch.take()["tokens"]) == [(1, 4, [4])]


def test_streams_numbered_beyond_32_bits_travel_as_chunks(rig: Any) -> None:
    """The compact form is left where a generation outgrows it."""
    it = rig(credit=10**6)
    it.state.ended(it.peer, 1)
    it._start("a", 2**32, "never", 100)
    it.produce([1])
    batch = it.peer.batch.take()
    assert batch["tokens"] == b""
    assert batch["chunks"] == [[2**32, 0, [b"\x91\x01"], None]]


def test_items_numbered_beyond_32_bits_are_numbered_anew(rig: Any) -> None:
    """A stream may be as long as it likes; the compact number wraps around."""
    it = rig(credit=10**6)
    it.a.items = 2**32 - 1
    it.produce([7])
    it.produce([8])
    it.produce([9, 9])
    batch = it.peer.batch.take()
    wanted = [(1, 2**32 - 1, [7]), (1, 0, [8]), (1, 1, [9, 9])]
    assert unpack_tokens(batch["tokens"]) == wanted


def test_tick_too_large_for_one_message_is_sent_in_parts(rig: Any) -> None:
    """Tokens are looked at one by one where they might not fit together."""
    it = rig(credit=10**9)
    it.delivery.publish([Output("a", [[n, n]]) for n in range(70_000)])
    it.delivery.publish([Output("a", [[n]]) for n in range(70_000)])
    assert len(it.flushed) > 8
    said = it.said()
    assert said[:70_000] == [[n, n] for n in range(70_000)]
    assert said[70_000:] == [[n] for n in range(70_000)]


@pytest.mark.parametrize("rule", ["concatenate", "never", "replace"])
@pytest.mark.parametrize("item", [[70_000], ["t"], {"k": "v"}], ids=str)
def test_held_bytes_count_what_is_kept(rule: Any, item: Any) -> None:
    """The size that is bounded is near the memory taken, whatever is held."""
    piece = item if item == [70_000] else pack_item(item)
    tracemalloc.start()
    try:
        queued = SendQueue(rule)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2_000):
            queued.add(list(piece) if isinstance(piece, list) else bytes(piece))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 2.5 * queued.size + 4096
    count = 0
    while queued:
        queued.take()
        count += 1
    assert queued.size == 0
    joins = rule == "concatenate" and isinstance(item, list)
    assert count == (
        2_000 if rule == "never" else 1 if joins or rule == "replace" else 2_000
    )


def test_joined_lists_stay_within_the_limits_of_an_item() -> None:
    """What would not fit into one item is begun anew, and nothing is lost."""
    queued = SendQueue("concatenate")
    for _ in range(5):
        queued.add([1] * 10_000)
    for _ in range(5):
        queued.add(pack_item(["a" * 50] * 1_000))
    sizes = []
    while queued:
        piece = queued.take()
        sizes.append(len(piece if isinstance(piece, list) else unpack_item(piece)))
    assert sum(sizes) == 55_000
    assert len(sizes) == 3


class Slow:
    """Accepts nothing and ends nothing until a test lets it."""

    busy = False

    def __init__(self, script: Callable[[EngineLoop], None] | None = None) -> None:
        self.closing = True
        self._ended: set[str] = set()
        self._script = script

    def start(self, key: str, request: Any, tensors: Any) -> None:
        """Take it."""

    def started(self, key: str) -> bool:
        """Whether it is accepted: once nothing is slow."""
        return not self.closing

    def end(self, key: str) -> None:
        """Forget it, later."""
        self._ended.add(key)

    def ending(self, key: str) -> bool:
        """Whether something of it runs."""
        return self.closing and key in self._ended

    def cancel(self, key: str) -> None:
        """Let it be."""

    def step(self) -> list[Any]:
        """Produce nothing."""
        return []

    def status(self) -> dict[str, Any]:
        """Count nothing."""
        return {}

    def drive(self, loop: EngineLoop, transport: Any, pulse: Any) -> None:
        """Run the script instead of an event loop."""
        assert self._script is not None
        self._script(loop)
        loop.stop()


class Harness:
    """The parts of a loop whose one client is found gone at the next message."""

    def __init__(self) -> None:
        self.backend = Slow()
        self.state = ServerState()
        self.peer = self.state.peers[b"client"] = Peer(b"client")
        delivery = FlowController(
            self.state, self.backend, self._flush, hold=64, stall=1
        )
        self.ends = EndHandler(self.state, self.backend, delivery, self._flush)
        loans = ArenaLeases(None, self.state)
        self.starts = StartHandler(
            self.state, self.backend, loans, self.ends, self._flush
        )
        for generation in (1, 2):
            start = {"key": f"s{generation}", "window": 64, "request": {}}
            self.starts.begin(self.peer, generation, start, {})

    def _flush(self, peer: Peer) -> None:
        self.ends.forget_peer(peer)

    def crowd(self) -> None:
        """Leave no room in the next message of the client."""
        while not self.peer.batch.full:
            self.peer.batch.reject(99, "full", "x" * wire.MAX_TEXT)


def test_forgets_a_client_that_is_gone_at_a_done() -> None:
    """Its other pending ends are not confirmed any more."""
    harness = Harness()
    for generation in (1, 2):
        harness.ends.begin(harness.peer, generation)
    harness.crowd()
    harness.backend.closing = False
    harness.ends.settle()
    harness.ends.settle()
    assert not harness.state.peers


def test_forgets_a_client_that_is_gone_at_an_accept() -> None:
    """Its other streams go with it, in the middle of looking through them."""
    harness = Harness()
    harness.crowd()
    harness.starts.accept_now(harness.peer.streams.values())
    assert not harness.state.peers
    assert not harness.state.streams


class Clients:
    """A transport of any number of clients, in this thread."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[bytes, list[bytes]]] = deque()
        self._sent: dict[bytes, int] = {}
        self.done: dict[bytes, list[int]] = {}

    def say(self, address: bytes, kind: Kind, body: Any, generation: int = 0) -> None:
        """Let a client say something."""
        number = self._sent[address] = self._sent.get(address, -1) + 1
        message = wire.encode(
            kind, body, incarnation=1, sequence=number, generation=generation
        )
        self._arrived.append((address, [message]))

    def poll(self, milliseconds: int | None) -> None:
        """Not with a loop of one's own."""
        raise AssertionError

    def receive(self) -> Any:
        """Bring what was said."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        """Record the ends that a client receives."""
        message = wire.decode([head], accept=wire.FROM_ENGINE)
        self.done.setdefault(address, []).extend(message.body.get("done", ()))
        return True


def test_keeps_a_client_that_waits_for_an_end_among_too_many() -> None:
    """A client without streams may be forgotten for another; not a waiting one."""
    clients = Clients()
    control = {"start": [], "cancel": [], "grant": [], "end": []}

    def script(loop: EngineLoop) -> None:
        start = [1, "a", 64, pack_request({})]
        clients.say(b"first", Kind.CONTROL, {**control, "start": [start]})
        clients.say(b"first", Kind.CONTROL, {**control, "end": [1]})
        loop.turn()
        for number in range(65):
            clients.say(b"%d" % number, Kind.STATUS, {"ask": 1})
            loop.turn()
        assert clients.done[b"first"] == []
        backend.closing = False
        loop.turn()

    backend = Slow(script)
    EngineLoop(backend, incarnation=1).run(clients)
    assert clients.done[b"first"] == [1]


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, SMALL_REQUEST])
async def test_everything_is_said_once_and_in_order(size: int) -> None:
    """However much there is, each message is legal and ends come last."""
    control_batch = ControlBatch()
    request = bytes(size)
    for number in range(1, 5_001):
        control_batch.end(number)
        if number <= 3_000:
            control_batch.cancel(number)
        if number <= 400:
            control_batch.start(number, "\N{GRINNING FACE}" * 256, 2**62, request)
        control_batch.grant(number + 10_000, 2**62)
    said: dict[str, list[Any]] = {"start": [], "cancel": [], "grant": [], "end": []}
    while (body := control_batch.take()) is not None:
        # What one message may hold is checked before it is sent.
        wire.encode(Kind.CONTROL, body, incarnation=1, sequence=0)
        for name, entries in body.items():
            said[name] += entries
        # A message is read in the order of its fields, so they may share one.
        assert not said["cancel"] or len(said["start"]) == 400
        assert not said["end"] or len(said["cancel"]) == 3_000
    assert [it[0] for it in said["start"]] == list(range(1, 401))
    assert said["cancel"] == list(range(1, 3_001))
    assert said["end"] == list(range(1, 5_001))
    assert said["grant"] == [[n, 2**62] for n in range(10_001, 15_001)]


@pytest.mark.anyio
async def test_small_starts_of_one_turn_share_a_message() -> None:
    """A key counts with the bytes that it takes, not with those that it might."""
    control_batch = ControlBatch()
    for number in range(1, 101):
        control_batch.start(number, f"conversation#{number}", 2**16, bytes(64))
    body = control_batch.take()
    assert body is not None
    assert len(body["start"]) == 100
    assert control_batch.take() is None


@pytest.mark.anyio
async def test_many_starts_and_ends_do_not_wait_for_the_turn_of_the_loop() -> None:
    """The engine begins with the first of them while the others are made."""
    said: list[Any] = []

    class Link:
        def send(self, parts: Any) -> bool:
            said.append(wire.decode(parts, accept=wire.FROM_CLIENT).body)
            return True

    sender = Sender(Link(), 7, pytest.fail)  # type: ignore[arg-type]
    states = [StreamState(f"s#{it}", it, 2**16) for it in range(1, 101)]
    for state in states:
        sender.start(state, b"\x80", [], [])
    assert [len(body["start"]) for body in said] == [32, 32, 32]
    for state in states:
        sender.end(state)
    # Those that are left go together: nothing overtakes a start.
    assert [it[0] for body in said for it in body["start"]] == [*range(1, 101)]
    assert [it for body in said for it in body["end"]] == [*range(1, 93)]


@pytest.mark.anyio
async def test_batch_that_cannot_be_sent_loses_the_engine() -> None:
    """Those whose starts and ends were in it would wait for ever."""
    lost: list[str] = []

    class Link:
        def send(self, _: Any) -> bool:
            raise EncodeError("no_memory", "the system has no memory for a copy")

    sender = Sender(Link(), 7, lost.append)  # type: ignore[arg-type]
    for it in range(1, 41):
        sender.start(StreamState(f"s#{it}", it, 2**16), b"\x80", [], [])
    assert lost == ["client_fault"]


@pytest.mark.anyio
async def test_credit_of_one_turn_is_one_grant_and_none_goes_after_an_end() -> None:
    """Grants of a stream add up; once it is to be forgotten they are of no use."""
    control_batch = ControlBatch()
    for credit in (1, 2, 3):
        control_batch.grant(7, credit)
        control_batch.grant(8, credit)
    control_batch.end(8)
    wanted = {"start": [], "cancel": [], "grant": [[7, 6]], "end": [8]}
    assert control_batch.take() == wanted
    assert control_batch.take() is None


@pytest.mark.anyio
async def test_start_with_tensors_does_not_overtake_one_without(
    fake_engine: Any, no_leaks: None
) -> None:
    """Streams are numbered upwards, so they go in order, whatever they carry."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        with anyio.fail_after(20):
            await client.wait_ready()
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    box = Payload({"x": b"x"}) if number % 3 == 2 else None
                    text = "long" * 2_000 if number % 3 == 1 else ""
                    tasks.start_soon(client.start, f"s#{number}", {"t": text}, box)
                said = [await fake_engine.hear() for _ in range(6)]
                tasks.cancel_scope.cancel()
    generations = [fake_engine.generations[key] for _, key in said]
    assert generations == [1, 2, 3, 4, 5, 6]


GENERATIONS = (1, 2, 3)


def _random_message(draw: random.Random, sequence: int) -> Message:
    kind = draw.choices([Kind.TICK, Kind.READY, Kind.REPORT], [20, 1, 2])[0]
    incarnation = draw.choices([1, 0, 2], [30, 1, 1])[0]
    if kind is Kind.TICK:
        return Message(kind, incarnation, sequence, _random_tick(draw))
    body = {} if kind is Kind.READY else {"ask": draw.randrange(3), "status": {}}
    return Message(kind, incarnation, sequence, body)


def _random_tick(draw: random.Random) -> dict[str, Any]:
    failed = {"reason": "failed", "error": {"code": "c", "message": "m"}}
    finish = draw.choice([None, None, None, {"reason": "completed"}, failed])
    items = [(number, 65) for number in range(draw.randrange(3))]
    first = draw.choice([0, 0, 1, 2])
    number = draw.choice(GENERATIONS)
    tick: dict[str, Any] = {
        "accepted": [number],
        "rejected": [[number, "c", "m"]],
        "tokens": [(number, first, [1] * draw.randrange(1, 40))],
        "chunks": [[number, first, items, finish]],
        "done": [number],
        "freed": [number],
    }
    said = draw.choices(["chunks", "tokens", *tick], [9, 6, 2, 1, 1, 1, 2, 2])
    return {name: fields if name in said else [] for name, fields in tick.items()}


async def _read(state: StreamState) -> tuple[list[Any], int]:
    """Read what has arrived and ended; return items and failures."""
    stream = EngineStream(state, lambda _: None, lambda _, __: None)
    items, failures = [], 0
    while state.items or state.finished:
        try:
            items.append(await anext(stream))
        except EngineFailed:
            failures += 1
        except StopAsyncIteration:
            break
    return items, failures


@pytest.mark.anyio
async def test_table_raises_nothing_but_protocol_errors() -> None:
    """4,000 random lives: a message is understood, or a fault and nothing else."""
    draw = random.Random(7)
    faults = 0
    arena = Arena(8192)
    array = arena.empty(8, "u1")
    found = arena.find(memoryview(array))
    assert found is not None
    for _ in range(4_000):
        table = StreamTable(1, arena)
        states = {it: StreamState(f"s#{it}", it, 200) for it in GENERATIONS}
        for state in states.values():
            table.add(state)
        table.acquire_lease(states[1], [found[1]])
        report = table.status_replies[1] = StatusReply()
        try:
            table.dispatch(Message(Kind.READY, 1, 0, {}))
            for sequence in range(1, draw.randint(2, 6)):
                if draw.random() < 0.2:
                    state = states[draw.choice(GENERATIONS)]
                    state.end_sent = True
                    state.finish()
                table.dispatch(_random_message(draw, sequence))
        except ProtocolError:
            faults += 1
        table.mark_failed(lambda: EngineFailed("lost", ""))
        assert arena.statistics().leases == len(table.leases)
        arena.release_all_leases()
        assert table.streams == table.keys == {}
        assert report.answered.is_set()
        for state in states.values():
            assert state.settled or state.done
            assert state.finished
            items, failures = await _read(state)
            assert len(items) <= state.received
            assert failures <= 1
    assert 1_000 < faults < 4_000
    arena.close()
