"""A process that maps an arena and answers questions about it; run as a script.

Reads lines of JSON, ``[method, argument, …]``, and answers each with one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from lifecycle_zmq import ArenaView, ProtocolError
from lifecycle_zmq.shared_memory.tensors import Place


class Peer:
    """The methods that may be asked for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.view = ArenaView(descriptor)
        self.held: dict[str, Any] = {}

    def take(self, lease: int, name: str, *where: Any) -> Any:
        """Hold one tensor as a loan of its own; say what it looks like."""
        tensors: dict[str, memoryview | Place] = {"it": Place(*where)}
        self.view.resolve((b"", lease), tensors)
        view = self.held[name] = cast("memoryview", tensors["it"])
        return [view.readonly, view.format, list(view.shape), sum(view.cast("B")[:64])]

    def look(self, name: str) -> Any:
        """Say what is in a tensor now."""
        return sum(self.held[name].cast("B")[:64])

    def write(self, name: str) -> Any:
        """Try to change it."""
        self.held[name].cast("B")[0] = 1

    def drop(self, name: str) -> Any:
        """Let go of a tensor; say which loans ended."""
        del self.held[name]
        return [number for _, number in self.view.released()]

    def leases(self) -> Any:
        """Say how many loans go on."""
        return self.view.leases

    def descriptors(self) -> Any:
        """Say whether the descriptor is still open."""
        return Path(f"/proc/self/fd/{self.descriptor}").exists()


def main() -> None:
    """Answer until standard input ends."""
    try:
        peer = Peer(int(sys.argv[1]))
    except (OSError, ValueError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        return
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = getattr(peer, method)(*arguments)
        except (ProtocolError, TypeError) as error:
            answer = type(error).__name__
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
