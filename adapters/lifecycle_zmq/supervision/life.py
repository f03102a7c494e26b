"""One incarnation of an engine, whatever runs it, as its supervisor sees it."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from lifecycle import EngineLost
from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.supervision.liveness import LiveHealth


class Life:
    """One incarnation of an engine, from its start until nothing is left of it.

    Args:
        number: What every message of it carries.
        retry_after: Seconds that its waiters are told when it dies.
        changed: Called when it began to serve, and when it is given up.

    Attributes:
        client: The client, while there is one.
        reason: Why it ended, in one word.
        start_seconds: How long it took until it served; ``None`` if it never did.
    """

    def __init__(
        self, number: int, retry_after: float, changed: Callable[[], None]
    ) -> None:
        self._number = number
        self._retry_after = retry_after
        self._changed = changed
        self._began = anyio.current_time()
        self.client: EngineClient | None = None
        self.reason = "starting"
        self.start_seconds: float | None = None

    @property
    def why(self) -> str:
        """Why it takes no requests, in one word, from the moment that it does not."""
        return (self.client.lost if self.client is not None else None) or self.reason

    @property
    def takes(self) -> bool:
        """Whether requests are taken, as far as the last looks have shown."""
        return self.client is not None and self.client.ready

    @property
    def health(self) -> LiveHealth | None:
        """How it is doing, as of now; ``None`` if it does not serve."""
        return "serving" if self.takes else None

    async def run(self) -> None:
        """Start, serve, end; an error of any of it is a reason, never raised.

        Cancellation: nothing is left of it, its waiters are told.
        """
        raise NotImplementedError

    async def _await_ready(self, client: EngineClient) -> None:
        try:
            await client.wait_ready()
        except EngineLost:
            return
        self.start_seconds = anyio.current_time() - self._began
        self._changed()
