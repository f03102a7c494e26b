"""What the client gathers in one turn: nothing overtakes what it depends on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from lifecycle import Payload
from lifecycle_zmq import EngineClient
from lifecycle_zmq._errors import EncodeError
from lifecycle_zmq.client.outbox import SMALL_REQUEST, Outbox
from lifecycle_zmq.client.sender import Sender
from lifecycle_zmq.client.streams import StreamState
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Kind

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize("size", [1, SMALL_REQUEST])
async def test_everything_is_said_once_and_in_order(size: int) -> None:
    """However much there is, each message is legal and ends come last."""
    outbox = Outbox()
    request = bytes(size)
    for number in range(1, 5_001):
        outbox.end(number)
        if number <= 3_000:
            outbox.cancel(number)
        if number <= 400:
            outbox.start(number, "\N{GRINNING FACE}" * 256, 2**62, request)
        outbox.grant(number + 10_000, 2**62)
    said: dict[str, list[Any]] = {"start": [], "cancel": [], "grant": [], "end": []}
    while (body := outbox.take()) is not None:
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


async def test_small_starts_of_one_turn_share_a_message() -> None:
    """A key counts with the bytes that it takes, not with those that it might."""
    outbox = Outbox()
    for number in range(1, 101):
        outbox.start(number, f"conversation#{number}", 2**16, bytes(64))
    body = outbox.take()
    assert body is not None
    assert len(body["start"]) == 100
    assert outbox.take() is None


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


async def test_credit_of_one_turn_is_one_grant_and_none_goes_after_an_end() -> None:
    """Grants of a stream add up; once it is to be forgotten they are of no use."""
    outbox = Outbox()
    for credit in (1, 2, 3):
        outbox.grant(7, credit)
        outbox.grant(8, credit)
    outbox.end(8)
    wanted = {"start": [], "cancel": [], "grant": [[7, 6]], "end": [8]}
    assert outbox.take() == wanted
    assert outbox.take() is None


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
