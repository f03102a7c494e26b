"""The clients of `http_streams.py`, in a process and one thread of their own.

    python benchmarks/http_streams_load.py PORT STREAMS TOKENS KIND

KIND is ``stream``: STREAMS connections ask at once for TOKENS events each; or
``short``: the same connections, kept alive, ask again and again for an answer that is
not streamed, TOKENS times each.

Prints JSON: the seconds of the whole, of first events, and of the gaps between reads
of one stream that brought events (a read may bring several); how many events came; how
many clients got no answer, and what the first of these got instead.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field


def request(tokens: int, *, stream: bool) -> bytes:
    """Return the bytes of a request that keeps its connection."""
    body = json.dumps(
        {
            "model": "sim",
            "messages": [{"role": "user", "content": "How are you?"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Client:
    """One connection.

    Attributes:
        socket: Connected, non-blocking.
        asked: When its request was sent.
        last: When its last events came; 0 before the first.
        tail: The last bytes that came.
        left: Requests still to be sent.
    """

    socket: socket.socket
    asked: float = 0.0
    last: float = 0.0
    tail: bytes = b""
    left: int = 0


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    events: int = 0
    failed: int = 0
    instead: str = ""

    def fail(self, got: bytes) -> None:
        """Note a client without an answer."""
        self.failed += 1
        self.instead = self.instead or got.decode(errors="replace") or "nothing"

    def streamed(self, client: Client, data: bytes, now: float) -> bool:
        """Note what came of a stream; whether that was its end."""
        begins = not client.tail
        if not data or (begins and b" 200 " not in data[:16]):
            self.fail(data or client.tail)
            return True
        events = (client.tail[-1:] + data).count(b"\n\n")
        client.tail = (client.tail + data)[-64:]
        if events:
            self.events += events
            if client.last:
                self.gaps.append(now - client.last)
            else:
                self.first.append(now - client.asked)
            client.last = now
        return b"data: [DONE]" in client.tail

    def answered(self, client: Client, data: bytes, now: float) -> bool:
        """Note what came of a short answer; whether that was its end."""
        client.tail += data
        head, _, body = client.tail.partition(b"\r\n\r\n")
        if data and not body:
            return False
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if data and len(body) < int(length):
            return False
        if not data or b" 200 " not in head[:16]:
            self.fail(client.tail)
        self.first.append(now - client.asked)
        self.events += 1
        client.tail = b""
        return True


def run(port: int, streams: int, tokens: int, kind: str) -> dict[str, object]:
    """Be the clients."""
    streamed = kind == "stream"
    asking = request(tokens if streamed else 1, stream=streamed)
    selector = selectors.DefaultSelector()
    clients = []
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        client = Client(connection, left=1 if streamed else tokens)
        selector.register(connection, selectors.EVENT_READ, client)
        clients.append(client)
    seen = Seen()
    began = time.monotonic()
    for client in clients:
        ask(client, asking)
    while selector.get_map():
        for key, _ in selector.select(60):
            client = key.data
            data = client.socket.recv(65536)
            note = seen.streamed if streamed else seen.answered
            if not note(client, data, time.monotonic()):
                continue
            if data and client.left:
                ask(client, asking)
            else:
                selector.unregister(client.socket)
                client.socket.close()
    return {
        "seconds": time.monotonic() - began,
        "first": seen.first,
        "gaps": seen.gaps,
        "events": seen.events,
        "failed": seen.failed,
        "instead": seen.instead,
    }


def ask(client: Client, asking: bytes) -> None:
    """Send a request; it is smaller than any socket's buffer."""
    client.left -= 1
    client.asked = time.monotonic()
    client.socket.send(asking)


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print(json.dumps(found))
