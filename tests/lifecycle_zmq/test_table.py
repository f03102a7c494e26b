"""The client's state machine under messages that are well formed and make no sense."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lifecycle_zmq import EngineFailed, ProtocolError
from lifecycle_zmq.client.streams import EngineStream, StreamState
from lifecycle_zmq.client.table import Report, StreamTable
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.protocol.wire import Kind, Message

pytestmark = pytest.mark.anyio

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
    """Read what has arrived and is over; return items and failures told."""
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
        table.lend(states[1], [found[1]])
        report = table.reports[1] = Report()
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
        table.lose(lambda: EngineFailed("lost", ""))
        assert arena.statistics().loans == len(table.loans)
        arena.take_back_all()
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
