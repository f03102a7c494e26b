"""The loop of an engine over a transport of the test's own, turn by turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from zmq_wire import Kind, pack_request, wire

from lifecycle_zmq import EngineLoop, Output

CLIENT = b"client"


class Idle:
    """A backend that takes everything and produces nothing."""

    busy = False

    def __init__(self) -> None:
        self.live: set[str] = set()

    def start(self, key: str, request: Mapping[str, Any], tensors: Any) -> None:
        """Take it."""
        self.live.add(key)

    def cancel(self, key: str) -> None:
        """Nothing runs."""

    def end(self, key: str) -> None:
        """Forget it."""
        self.live.discard(key)

    def step(self) -> Sequence[Output]:
        """Never asked for."""
        raise AssertionError

    def status(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}


class Script:
    """A transport that brings what is on the list, and whose client may be gone."""

    def __init__(self, loop: EngineLoop, reached: int) -> None:
        self.loop, self.reached = loop, reached
        self.arrived: deque[tuple[bytes, list[bytes]]] = deque()

    def bring(self, kind: Kind, body: dict[str, Any], **header: int) -> None:
        """Append a message of the client."""
        sequence = len(self.arrived)
        head = wire.encode(kind, body, incarnation=1, sequence=sequence, **header)
        self.arrived.append((CLIENT, [head]))

    def poll(self, milliseconds: int | None) -> None:
        """Leave when everything was brought."""
        if not self.arrived:
            self.loop.stop()

    def receive(self) -> Any:
        """Bring the next one."""
        return self.arrived.popleft() if self.arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        """Reach the client as often as it was said."""
        self.reached -= 1
        return self.reached >= 0


def start(key: str) -> dict[str, Any]:
    """The map of a START."""
    request = pack_request({})
    return {"key": key, "window": 8, "request": request, "tensors": []}


@pytest.mark.parametrize("reached", [0, 1])
def test_starts_nothing_for_a_client_that_is_gone(reached: int) -> None:
    """Its earlier messages are still there, but its streams would never be ended."""
    backend = Idle()
    loop = EngineLoop(backend, incarnation=1)
    script = Script(loop, reached)
    for generation in range(1, 5):
        script.bring(Kind.START, start(f"key-{generation}"), generation=generation)
    loop.run(script)
    assert backend.live == set()
    assert loop._state.counters()["live"] == 0
