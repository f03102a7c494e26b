"""A server that speaks OpenAI's chat completions, to be behind a proxy.

What a request has in its text decides: `WHOLE` is answered at once; of `BEGUN`, the
first part of a stream is sent, and of `QUEUED` nothing. The last two go on until their
client leaves, or the test lets them finish. Events say what comes and what ends.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from select import select
from typing import Any, Final

# A guard against hanging.
SECONDS: Final = 600.0
WHOLE, BEGUN, QUEUED = "whole", "begun", "queued"
_COMMON: Final = {"id": "one", "created": 1, "model": "sim"}
_USAGE: Final = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _answer(name: str, said: dict[str, str], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, name: said, "finish_reason": finish}
    kind = "chat.completion.chunk" if name == "delta" else "chat.completion"
    return {**_COMMON, "object": kind, "choices": [choice]}


def _part(said: dict[str, str], finish: str | None = None) -> bytes:
    return b"data: " + json.dumps(_answer("delta", said, finish)).encode() + b"\n\n"


class Backend:
    """What the test knows of the server.

    Args:
        port: Where it listens.

    Attributes:
        url: Of its API.
        finish: Once it is set, all that goes on is finished.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.finish = threading.Event()
        self._events: queue.Queue[str] = queue.Queue()

    def say(self, event: str) -> None:
        """Add an event."""
        self._events.put(event)

    def event(self) -> str:
        """Wait for the next event: ``has``, ``left`` or ``finished``."""
        return self._events.get(timeout=SECONDS)


class _Handler(BaseHTTPRequestHandler):
    chat: Backend

    def do_POST(self) -> None:
        """Answer a request, or hold it."""
        body = self.rfile.read(int(self.headers["content-length"]))
        streams = json.loads(body).get("stream", False)
        begun, queued = (each.encode() in body for each in (BEGUN, QUEUED))
        self.close_connection = True
        self.chat.say("has")
        if queued and not self._may_finish():
            return
        self.send_response(200)
        kind = "text/event-stream" if streams else "application/json"
        self.send_header("content-type", kind)
        self.end_headers()
        said = {"role": "assistant", "content": "hello"}
        if not streams:
            whole = {**_answer("message", said, "stop"), "usage": _USAGE}
            self.wfile.write(json.dumps(whole).encode())
        else:
            self.wfile.write(_part(said))
            if begun and not self._may_finish():
                return
            self.wfile.write(_part({}, "stop") + b"data: [DONE]\n\n")
        self.chat.say("finished")

    def _may_finish(self) -> bool:
        """Wait for the word to finish; False if the client leaves before."""
        while not self.chat.finish.is_set():
            if select([self.connection], [], [], 0.05)[0]:
                self.chat.say("left")
                return False
        return True

    def log_message(self, *_args: Any) -> None:
        """Be silent."""


@contextmanager
def backend() -> Iterator[Backend]:
    """Run a server in threads, and end it with what goes on."""

    class Handler(_Handler):
        """Of this server."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        chat = Handler.chat = Backend(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield chat
        finally:
            chat.finish.set()
            server.shutdown()
            thread.join(SECONDS)
