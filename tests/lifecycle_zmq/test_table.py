"""The client's state machine under messages that are well formed and make no sense."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lifecycle_zmq import EngineFailed, ProtocolError
from lifecycle_zmq._streams import EngineStream, StreamState
from lifecycle_zmq._table import Report, StreamTable
from lifecycle_zmq.wire import FROM_ENGINE, Kind, Message

pytestmark = pytest.mark.anyio

KEYS = ("a", "b", "c")


def _random_message(draw: random.Random, sequence: int) -> Message:
    kind = draw.choices(
        [Kind.CHUNKS, Kind.ACCEPTED, Kind.DONE, *FROM_ENGINE], [9, 3, 3, *[1] * 6]
    )[0]
    key = draw.choice(KEYS)
    failed = {"reason": "failed", "error": {"code": "c", "message": "m"}}
    finish = draw.choice([None, None, None, {"reason": "completed"}, failed])
    items = list(range(draw.randrange(3)))
    bodies: dict[Kind, dict[str, Any]] = {
        Kind.READY: {},
        Kind.REJECTED: {"key": key, "code": "c", "message": "m"},
        Kind.CHUNKS: {"chunks": [[key, draw.choice([0, 0, 1, 2]), items, finish]]},
        Kind.REPORT: {"ask": draw.randrange(3), "status": {}},
    }
    incarnation = draw.choices([1, 0, 2], [30, 1, 1])[0]
    return Message(kind, incarnation, sequence, bodies.get(kind, {"key": key}))


async def _read(state: StreamState) -> tuple[list[Any], int]:
    """Read what has arrived and is over; return items and failures told."""
    stream, items, failures = EngineStream(state, lambda _: None), [], 0
    while state.items or state.finished:
        try:
            items.append(await anext(stream))
        except EngineFailed:
            failures += 1
        except StopAsyncIteration:
            break
    return items, failures


async def test_table_raises_nothing_but_protocol_errors() -> None:
    """4,000 random lives: a message is understood, or a fault and nothing else."""
    draw = random.Random(7)
    faults = 0
    for _ in range(4_000):
        table = StreamTable(1)
        states = {key: StreamState(key) for key in KEYS}
        table.streams.update(states)
        report = table.reports[1] = Report()
        try:
            table.dispatch(Message(Kind.READY, 1, 0, {}))
            for sequence in range(1, draw.randint(2, 6)):
                if draw.random() < 0.2:
                    state = states[draw.choice(KEYS)]
                    state.end_sent = True
                    state.finish()
                table.dispatch(_random_message(draw, sequence))
        except ProtocolError:
            faults += 1
        table.lose(lambda: EngineFailed("lost", ""))
        assert table.streams == {}
        assert report.answered.is_set()
        for state in states.values():
            assert state.settled.is_set() or state.done.is_set()
            assert state.finished
            items, failures = await _read(state)
            assert len(items) <= state.received
            assert failures <= 1
    assert 1_000 < faults < 4_000
