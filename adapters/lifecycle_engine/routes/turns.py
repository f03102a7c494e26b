"""Requests begin one by one, however many come in at once."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel

from lifecycle import Gate
from lifecycle_asgi import client_address

_LINES = 64


class Turns:
    """Lets one request begin at a time, and whatever else is ready run before the next.

    An event loop runs everything that is ready before it looks again. Of two hundred
    requests that come in at once, the beginnings alone would be one step of tens of
    milliseconds, even where each of them is only told to go away, and every stream
    would stand still meanwhile. Addresses take turns, so that many requests from one of
    them delay the others' by one. A turn costs the more the more lines there are, so
    that some addresses share one, and nobody can know which (stochastic fair queueing,
    McKenney 1990).

    Args:
        app: The application to wrap; each request counts as begun when it first waits.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._gate = Gate(slots=1, order="fair", name="turns")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through; whoever waits for its turn leaves the line.
        """
        if scope["type"] == "http":
            line = hash(client_address(scope)) % _LINES
            with await self._gate.admit(key=str(line)):
                await anyio.lowlevel.checkpoint()
        await self._app(scope, receive, send)
