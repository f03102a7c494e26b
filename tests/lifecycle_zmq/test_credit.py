"""Readers that are slow: what the server holds, merges, and gives up."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from lifecycle_zmq import Finish, Output
from lifecycle_zmq.protocol.items import pack_item, unpack_item, unpack_tokens
from lifecycle_zmq.server.backlog import Backlog
from lifecycle_zmq.server.books import Books, Peer, ServedStream
from lifecycle_zmq.server.delivery import Delivery

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
    """A backend that can also be told to wait."""

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
        self.books = Books()
        self.peer = self.books.peers[b"p"] = Peer(b"p")
        self.flushed: list[dict[str, Any]] = []
        self.delivery = Delivery(
            self.books, self.backend, self._flush, hold=HOLD, stall=30.0
        )
        self.a = self._start("a", 1, merge, credit)
        self.b = self._start("b", 2, merge, 10**6)

    def _start(self, key: str, generation: int, merge: Any, credit: int) -> Any:
        stream = ServedStream(key, generation, self.peer, credit, merge)
        self.books.started(stream)
        return stream

    def _flush(self, peer: Peer) -> None:
        self.flushed.append(peer.tick.take())

    def produce(
        self, *items: Any, key: str = "a", finish: Finish | None = None
    ) -> None:
        """Let the backend produce items for one stream in one step."""
        self.delivery.publish([Output(key, list(items), finish)])

    def said(self, generation: int = 1) -> list[Any]:
        """What the client was told about a stream since the last call, in order."""
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
    """Make a rig; its backend cannot pause unless told otherwise."""
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
    """Beyond the bytes to hold, the stream ends: told once, cancelled once."""
    it = rig(credit=1)
    for number in range(100):
        it.produce([number])
    assert it.said() == [[0], "slow_client"]
    assert it.backend.calls == ["cancel a"]
    it.produce(finish=Finish("cancelled"))
    it.delivery.grant(it.a, 10**6)
    assert it.said() == []
    assert it.books.counters()["slow_clients"] == 1
    assert it.delivery.patience() is None


def test_reader_that_takes_nothing_ends_after_the_stall_limit(rig: Any) -> None:
    """The limit counts from the last credit; an end that waits ends likewise."""
    it = rig(merge="concatenate", credit=1)
    it.produce([1], [2])
    it.now = 29.0
    it.delivery.expire()
    assert it.delivery.patience() == 1.0
    it.delivery.grant(it.a, 68)
    assert (it.said(), it.delivery.patience()) == ([[1], [2]], None)
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
    assert it.delivery.patience() is None


def test_slow_but_moving_reader_is_not_given_up(rig: Any) -> None:
    """Some credit now and then is progress; each time the limit begins anew."""
    it = rig(credit=1)
    it.produce(*[[number] for number in range(10)])
    for _ in range(8):
        it.now += 29.0
        it.delivery.expire()
        it.delivery.grant(it.a, 68)
    assert it.said() == [[number] for number in range(9)]
    assert it.backend.calls == []


def test_what_one_step_yields_is_held_whole(rig: Any) -> None:
    """A burst of one step is no slow reader; only the next step is too much."""
    it = rig()
    it.produce(*["x" * 100] * 100)
    assert len(it.said()) == 1
    it.delivery.grant(it.a, 10**6)
    assert len(it.said()) == 99
    assert it.backend.calls == []


def test_backend_that_can_pause_is_paused_and_resumed(rig: Any) -> None:
    """Half-way to the limit the backend is told to wait, and to go on after."""
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
    assert it.delivery.patience() is None


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
    tick = it.peer.tick.take()
    assert unpack_tokens(tick["tokens"]) == [(1, 0, [1]), (2, 0, [1]), (2, 1, [2])]
    ((generation, first, items, finish),) = tick["chunks"]
    assert (generation, first, finish) == (1, 1, None)
    assert list(map(msgpack.unpackb, items)) == [{"x": 1}, [2], [3]]
    it.produce([4])
    assert unpack_tokens(it.peer.tick.take()["tokens"]) == [(1, 4, [4])]


def test_streams_numbered_beyond_32_bits_travel_as_chunks(rig: Any) -> None:
    """The compact form is left where a generation outgrows it."""
    it = rig(credit=10**6)
    it.books.ended(it.peer, 1)
    it._start("a", 2**32, "never", 100)
    it.produce([1])
    tick = it.peer.tick.take()
    assert tick["tokens"] == b""
    assert tick["chunks"] == [[2**32, 0, [b"\x91\x01"], None]]


def test_items_numbered_beyond_32_bits_are_numbered_anew(rig: Any) -> None:
    """A stream may be as long as it likes; the compact number wraps around."""
    it = rig(credit=10**6)
    it.a.items = 2**32 - 1
    it.produce([7])
    it.produce([8])
    it.produce([9, 9])
    tick = it.peer.tick.take()
    wanted = [(1, 2**32 - 1, [7]), (1, 0, [8]), (1, 1, [9, 9])]
    assert unpack_tokens(tick["tokens"]) == wanted


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
        held = Backlog(rule)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2_000):
            held.add(list(piece) if isinstance(piece, list) else bytes(piece))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 2.5 * held.size + 4096
    count = 0
    while held:
        held.take()
        count += 1
    assert held.size == 0
    joins = rule == "concatenate" and isinstance(item, list)
    assert count == (
        2_000 if rule == "never" else 1 if joins or rule == "replace" else 2_000
    )


def test_joined_lists_stay_within_the_limits_of_an_item() -> None:
    """What would not fit into one item is begun anew, and nothing is lost."""
    held = Backlog("concatenate")
    for _ in range(5):
        held.add([1] * 10_000)
    for _ in range(5):
        held.add(pack_item(["a" * 50] * 1_000))
    sizes = []
    while held:
        piece = held.take()
        sizes.append(len(piece if isinstance(piece, list) else unpack_item(piece)))
    assert sum(sizes) == 55_000
    assert len(sizes) == 3
