"""The API process's end of one actor: calls instead of a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import anyio
import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from lifecycle_zmq import EncodeError
from lifecycle_zmq.protocol.wire import Buffer
from lifecycle_zmq.transport import Handle
from lifecycle_zmq.transport.bell import Bell

from ._actor import Served
from ._results import watched

# A pull that finds nothing comes back after so long, and shows that all is well.
PULL_SECONDS = 1.0


class RayLink:
    """A `lifecycle_zmq.transport.ClientTransport` to one actor.

    One pull is under way at any time, so that what the engine says in one step costs
    one call, however many streams it is for.

    Args:
        actor: Handle of an `EngineActor`.
        handle: Called with each message that came.
        served: Called with each answer to a pull, before its messages are handled.
        failed: Told, once, with what a call failed.
    """

    def __init__(
        self,
        actor: Any,
        handle: Handle,
        *,
        served: Callable[[Served], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._actor = actor
        self._handle = handle
        self._served = served
        self._failed = failed
        self._sent = 0
        self._pull: Future[Served] | None = None
        self._pushed: set[Future[None]] = set()
        self._bell = Bell()
        self._over = False

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Put tensors into the object store, and call; False after a failure.

        The references are dropped at once: the call alone keeps the tensors, until
        the actor has let go of them.

        Raises:
            EncodeError: The object store is full.
        """
        if self._over:
            return False
        head, *memory = parts
        try:
            tensors = [ray.put(np.frombuffer(it, np.uint8)) for it in memory]
        except (ObjectStoreFullError, OutOfDiskError):
            raise EncodeError(
                "no_memory", "the object store is full; admit fewer bytes at a time"
            ) from None
        reference = self._actor.push.remote(self._sent, bytes(head), *tensors)
        self._sent += 1
        self._pushed.add(watched(reference, self._bell.ring))
        return True

    def drain(self) -> None:
        """Handle what the last pull returned, if it has returned."""
        pull = self._pull
        if pull is None or not pull.done() or self._over:
            return
        self._pull = None
        try:
            served = pull.result()
        except RayError as error:
            self._fail(error)
            return
        self._served(served)
        for head in served.heads:
            if not self._handle([head]):
                return

    async def pump(self, greet: Callable[[], bool]) -> None:
        """Pull, for ever.

        Cancellation: at any time; what is under way is dropped.
        """
        greet()
        while not self._over:
            if self._pull is None:
                reference = self._actor.pull.remote(PULL_SECONDS)
                self._pull = watched(reference, self._bell.ring)
            await self._bell.wait()
            self._look_at_pushes()
            self.drain()
        await anyio.sleep_forever()

    def close(self) -> None:
        """Take and send nothing more."""
        self._over = True
        self._pull = None
        self._pushed.clear()

    def _look_at_pushes(self) -> None:
        for push in [it for it in self._pushed if it.done()]:
            self._pushed.discard(push)
            # Without it the actor would keep everything that follows for ever.
            error = push.exception()
            if error is not None:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            self._failed(error)
