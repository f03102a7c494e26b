"""Reading request bodies, from clients who may be slow or gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from lifecycle import GateClosed
from lifecycle_engine.api_errors import ApiError

# What has to come of a body, on average, in the time that it may stand still.
_PACE = 65536
# Seconds between looks at whether others wait.
_LOOK = 0.5
# Seconds that a body always has: what was sent with its head is here, but not yet read.
_LEAST = 0.05


class ClientLeft(Exception):
    """The client left while its request was being read; nobody waits for more."""


class BodyReader:
    """Reads bodies, each within its time.

    A body is admitted whole when it begins, and keeps others out for as long as it
    takes. So it has to come at a pace; and while others wait for its room, all of it
    has to be there in *patience* seconds.

    Args:
        idle: Seconds that a body may stand still, or take for 64 KiB.
        patience: Seconds that a body may take in all while others wait.
        awaited: Whether others wait.
    """

    def __init__(
        self,
        *,
        idle: float = 10.0,
        patience: float = 30.0,
        awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._idle = idle
        self._patience = patience
        self._awaited = awaited
        self._closed = False
        self._reading: set[anyio.CancelScope] = set()

    def close(self) -> None:
        """Read no more: whoever is still sending a body is told to go elsewhere."""
        self._closed = True
        for scope in self._reading:
            scope.cancel()

    async def read(self, receive: Any) -> list[bytes]:
        """Read one body, in as many pieces as it comes in.

        Raises:
            ApiError: 408.
            ClientLeft: The client disconnected.
            GateClosed: `close` was called.

        Cancellation:
            At any time.
        """
        chunks: list[bytes] = []
        began = anyio.current_time()
        last = began + self._idle
        while True:
            until = min(last, anyio.current_time() + self._idle)
            patience = began + max(self._patience, _LEAST)
            message = await self._message(receive, until, patience)
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunks.append(message.get("body", b""))
            last += self._idle * len(chunks[-1]) / _PACE
            if not message.get("more_body", False):
                return chunks

    async def _message(self, receive: Any, until: float, patience: float) -> Any:
        while True:
            now = anyio.current_time()
            late = now >= patience
            if late and self._awaited():
                problem = (
                    f"The body took over {self._patience:g} s and others wait for "
                    f"its room; send it faster, or later"
                )
                raise ApiError(408, problem, code="body_timeout")
            look = now + _LOOK if late else patience
            message = await self._receive(receive, min(until, look))
            if message is not None:
                return message
            if self._closed:
                raise GateClosed("the server is shutting down; ask another one")
            if anyio.current_time() >= until:
                problem = f"64 KiB of the body took over {self._idle:g} s"
                message = f"{problem}; send it faster"
                raise ApiError(408, message, code="body_timeout")

    async def _receive(self, receive: Any, until: float) -> Any:
        """The next message; ``None`` if it did not come until then."""
        with anyio.CancelScope(deadline=until) as scope:
            if self._closed:
                scope.cancel()
            self._reading.add(scope)
            try:
                return await receive()
            finally:
                self._reading.discard(scope)
        return None
