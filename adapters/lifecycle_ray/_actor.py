"""The engine's side: an actor that runs one backend for the one who made it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import ray

from lifecycle_zmq import Backend, EngineLoop
from lifecycle_zmq.transport.queued import QueuedTransport

Factory = Callable[[], Backend]

# The one client of an actor. Another owner has actors of its own.
_OWNER = b"owner"
EXIT_FAILED = 70


class Served(NamedTuple):
    """An answer to `pull`.

    Attributes:
        heads: What the engine said since the last one, in order.
        turns: Counts on with every turn of the engine's loop.
        working: Whether the loop is at work, rather than asleep.
    """

    heads: list[bytes]
    turns: int
    working: bool


class EngineActor:
    """Runs a backend in a thread; its owner pushes messages, and pulls the answers.

    It is one incarnation of an engine: when its backend fails, its process ends.

    Args:
        factory: Makes the backend, or says where that is: ``"package.module:name"``.
        incarnation: What every message of it carries.
        hold: As for `lifecycle_zmq.EngineServer`.
        stall: As for `lifecycle_zmq.EngineServer`.
        owner_timeout: Seconds without a pull after which the owner counts as gone, and
            all its streams are ended.
    """

    def __init__(
        self,
        factory: Factory | str,
        *,
        incarnation: int,
        hold: int,
        stall: float,
        owner_timeout: float,
    ) -> None:
        self._factory = factory
        self._options: dict[str, Any] = {
            "incarnation": incarnation,
            "hold": hold,
            "stall": stall,
        }
        self._transport = QueuedTransport()
        self._said: deque[bytes] = deque()
        self._news = threading.Condition()
        self._order = _Order(self._transport)
        self._owner_timeout = owner_timeout
        # Not before its first pull: until then the backend is being made.
        self._pulled: float | None = None
        self._pulling = False
        self._forgotten = False
        self._built = threading.Event()
        self._failure: Exception | None = None
        self._transport.join(_OWNER, self._say)
        for run in (self._run, self._watch_owner):
            threading.Thread(target=run, name="lifecycle-engine", daemon=True).start()

    @ray.method(concurrency_group="control")
    def hello(self) -> dict[str, Any]:
        """Return where this is, once the backend is built; or raise why it is not."""
        self._built.wait()
        if self._failure is not None:
            raise self._failure
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": node}

    @ray.method(concurrency_group="control")
    def push(self, number: int, head: bytes, *tensors: np.ndarray) -> None:
        """Take a message; those that overtook others wait for them."""
        self._order.put(number, [head, *(it.data for it in tensors)])

    @ray.method(concurrency_group="pull")
    def pull(self, seconds: float) -> Served:
        """Return what was said since the last pull; wait for it, but not longer.

        Raises:
            RuntimeError: There was none for so long that the owner's streams are ended.
        """
        self._pulling = True
        if self._forgotten:
            raise RuntimeError("the owner came back too late; its streams are ended")
        try:
            with self._news:
                self._news.wait_for(lambda: self._said, seconds)
            heads = [self._said.popleft() for _ in range(len(self._said))]
            return Served(heads, self._transport.turns, not self._transport.waiting)
        finally:
            self._pulled = time.monotonic()
            self._pulling = False

    def _say(self, head: bytes) -> None:
        with self._news:
            self._said.append(head)
            self._news.notify()

    def _run(self) -> None:
        try:
            loop = EngineLoop(_build(self._factory), **self._options)
        except Exception as error:  # noqa: BLE001 - raised in `hello`
            self._failure = error
            self._built.set()
            return
        except BaseException as error:  # noqa: ASYNC103, BLE001 - no loop runs here
            # Such as of a device that is lost. Raised there as it is, it would end
            # this actor as if it were to.
            self._failure = RuntimeError(str(error))
            self._built.set()
            return  # noqa: ASYNC104 - as above
        self._built.set()
        try:
            loop.run(self._transport, self._transport)
        finally:
            # Nobody is answered any more. With the process all that it held is gone.
            os._exit(EXIT_FAILED)

    def _watch_owner(self) -> None:
        # Ray ends the actors of a driver that it sees die. This is for one that it does
        # not see: stopped, or cut off.
        while True:
            time.sleep(self._owner_timeout / 4)
            if self._pulling or self._pulled is None:
                continue
            if time.monotonic() - self._pulled > self._owner_timeout:
                self._forgotten = True
                self._transport.leave(_OWNER)


class _Order:
    """Puts messages back in order: calls run in threads, and may wait for tensors."""

    def __init__(self, transport: QueuedTransport) -> None:
        self._transport = transport
        self._next = 0
        self._early: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def put(self, number: int, parts: list[Any]) -> None:
        with self._lock:
            self._early[number] = parts
            while self._next in self._early:
                self._transport.put(_OWNER, self._early.pop(self._next))
                self._next += 1


def _build(factory: Factory | str) -> Backend:
    if not isinstance(factory, str):
        return factory()
    module, _, name = factory.partition(":")
    made: Backend = getattr(import_module(module), name)()
    return made
