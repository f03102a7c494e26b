"""Requests begin one by one, however many come in at once."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.lowlevel

from lifecycle import Gate
from lifecycle_asgi import client_address

PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
"""What those ask who decide whether this server lives on."""

_LINES = 64
# Seconds in which one request may begin without a turn; uvloop's clock counts no less.
_ALONE = 0.001

Refuse = Callable[[Any, Any], Awaitable[bool]]


async def _nobody(scope: Any, send: Any) -> bool:  # noqa: ARG001
    return False


class Turns:
    """Lets one request begin at a time, and whatever else is ready run before the next.

    An event loop runs everything that is ready before it looks again. Of two hundred
    requests that come in at once, the beginnings alone would be one step of tens of
    milliseconds, even where each of them is only told to go away, and every stream
    would stand still meanwhile. Addresses take turns, so that many requests from one of
    them delay the others' by one. A turn costs the more the more lines there are, so
    that some addresses share one, and nobody can know which (stochastic fair queueing,
    McKenney 1990).

    Whoever comes alone needs no turn: each look of the loop at its sockets gives the
    interpreter away, and where threads compute it takes its time to come back. Probes
    have turns of their own, as a proxy's come from the address of all its clients.

    Args:
        app: The application to wrap; each request counts as begun when it first waits.
        refuse: Says no to a request, given the scope and ``send``, if it is to be
            refused before anything is made for it; returns whether it did.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        app: Any,
        refuse: Refuse = _nobody,
        *,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._app = app
        self._clock = clock
        self._refuse = refuse
        self._gate, self._probes = (
            Gate(slots=1, order="fair", name=name) for name in ("turns", "probes")
        )
        self._alone = -math.inf

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through; whoever waits for its turn leaves the line.
        """
        if scope["type"] == "http":
            gate = self._probes if scope["path"] in PROBES else self._gate
            if not self._comes_alone(gate):
                line = hash(client_address(scope)) % _LINES
                with await gate.admit(key=str(line)):
                    await anyio.lowlevel.checkpoint()
            # Behind the turn: an answer may wait for a client that does not read.
            if await self._refuse(scope, send):
                return
        await self._app(scope, receive, send)

    def _comes_alone(self, gate: Gate) -> bool:
        now = self._clock()
        if now - self._alone < _ALONE or gate.statistics().slots_in_use:
            return False
        self._alone = now
        return True
