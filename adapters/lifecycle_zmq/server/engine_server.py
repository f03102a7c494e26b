"""The engine process's side: one thread, one socket, one backend, one loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle_zmq import _options
from lifecycle_zmq.memory.arena_view import ArenaView
from lifecycle_zmq.process.pages import Page
from lifecycle_zmq.process.parent import (
    exit_with_parent,
    exit_with_process,
    leave_signals_to_parent,
)
from lifecycle_zmq.process.pulse import Pulse
from lifecycle_zmq.server.backend import Backend
from lifecycle_zmq.server.loop import EngineLoop
from lifecycle_zmq.transport import endpoints
from lifecycle_zmq.transport.pair import PairServer

if TYPE_CHECKING:
    from lifecycle_zmq.transport.zmq_server import Router


class EngineServer:
    """Serves one backend on one endpoint until told to stop.

    A frame that breaks the protocol is counted and dropped, whoever sent it. A client
    that is gone loses its streams at the first message that cannot reach it.

    Args:
        endpoint: What came after ``--endpoint``; or an ``ipc://`` address to listen
            on, in a directory of mode 0700.
        backend: What runs the requests.
        incarnation: The number of this process, given by whoever spawned it.
        leave_with_parent: Whether the process ends when its parent does, by whatever
            cause, and leaves SIGINT and SIGTERM to it; standard input must then be a
            pipe that the parent holds. On Linux the engine of a `ZmqEngine` is killed
            with its parent in any case, before it can clean up.
        hold: Bytes held for one stream whose reader has no credit. Beyond them it
            ends as ``slow_client``.
        stall: Seconds that a reader may take nothing while something is held for it,
            before its stream ends as ``slow_client``.
        writable_arena: Map the arena so that a device can be given it as pinned memory.

    Raises:
        TypeError: *backend* is no `Backend`, or another option of another kind.
        ValueError: A number is less than 0.

    Attributes:
        arena: Where large tensors lie, if the client has one.
    """

    def __init__(
        self,
        endpoint: str,
        backend: Backend,
        *,
        incarnation: int,
        leave_with_parent: bool = True,
        hold: int = 128 * 2**10,
        stall: float = 30.0,
        writable_arena: bool = False,
    ) -> None:
        _options.expect(str, "endpoint must be text, as it came", endpoint)
        _options.flags(leave_with_parent=leave_with_parent)
        _options.flags(writable_arena=writable_arena)
        self._endpoint, self._inherited = endpoints.split(endpoint)
        self.arena = ArenaView.attach(self._inherited, writable=writable_arena)
        self._leave_with_parent = leave_with_parent
        self._loop = EngineLoop(
            backend,
            incarnation=incarnation,
            hold=hold,
            stall=stall,
            arena=self.arena,
        )

    def run(self) -> None:
        """Serve until SHUTDOWN, or until its only client has hung up.

        Blocks the calling thread.
        """
        if self._leave_with_parent:
            exit_with_parent()
            exit_with_process(self._inherited.get("parent"))
            leave_signals_to_parent()
        # From here on this thread's death is told at once.
        pulse = Pulse(Page.attach(self._inherited.get("liveness")))
        try:
            with self._connect() as transport:
                self._loop.run(transport, pulse)
        finally:
            pulse.leave()

    def _connect(self) -> Router | PairServer:
        pair = self._inherited.get("link")
        if pair is not None:
            return PairServer(pair, self._loop.stop)
        from lifecycle_zmq.transport.zmq_server import Router

        return Router(self._endpoint, self._inherited.get("listener"))
