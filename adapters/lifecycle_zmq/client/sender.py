"""What the client says to the engine, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lifecycle_zmq._errors import EncodeError
from lifecycle_zmq._slot import Slot
from lifecycle_zmq.client.outbox import SMALL_REQUEST, Outbox
from lifecycle_zmq.client.streams import StreamState
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Kind
from lifecycle_zmq.transport import ClientTransport


class Sender:
    """Says at once what cannot wait, and the rest once a turn of the event loop.

    Made in the event loop that it belongs to.

    Args:
        link: What carries it.
        incarnation: Of the engine, which every message names.
        lose: Told in one word why nothing can be said any more.

    Attributes:
        outbox: What will be said at the end of this turn.
        slot: What the slots of its streams are like.
    """

    __slots__ = ("_incarnation", "_link", "_lose", "_sent", "_silent", "outbox", "slot")

    def __init__(
        self, link: ClientTransport, incarnation: int, lose: Callable[[str], None]
    ) -> None:
        self._link = link
        self._incarnation = incarnation
        self._lose = lose
        self._sent = 0
        self._silent = False
        self.outbox = Outbox()
        self.slot = Slot()

    async def run(self) -> None:
        """Send what the outbox has gathered, for ever.

        Cancellation: what was not sent yet stays unsaid.
        """
        while True:
            await self.outbox.wait()
            self._flush()

    async def listen(self) -> None:
        """Greet the engine once it is there, handle what it says until it hangs up.

        Cancellation: no message is lost, none is taken while this waits.
        """
        await self._link.pump(lambda: self._put(Kind.STATUS, {"ask": 0}))
        self._fall_silent("disconnected")

    def start(
        self,
        state: StreamState,
        request: bytes,
        described: list[list[Any]],
        memory: Sequence[memoryview],
    ) -> None:
        """Ask for a stream; the memory to be sent was copied when this returns.

        Raises:
            EncodeError: The message cannot be sent; nothing of it was.
        """
        if not described and len(request) <= SMALL_REQUEST:
            self.outbox.start(state.generation, state.key, state.window, request)
            self._flush_if_ample()
            return
        body = {
            "key": state.key,
            "window": state.window,
            "request": request,
            "tensors": described,
        }
        self.say(Kind.START, body, generation=state.generation, memory=memory)

    def end(self, state: StreamState) -> None:
        """Ask for a stream to be forgotten."""
        self.outbox.end(state.generation)
        self._flush_if_ample()

    def say(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> None:
        """Send one message now, after whatever the outbox has gathered before.

        Raises:
            EncodeError: The message cannot be sent; nothing of it was.
        """
        self._flush()
        self._send(kind, body, generation=generation, memory=memory)

    def _flush_if_ample(self) -> None:
        # The engine works on these while this process makes the next.
        if self.outbox.ample:
            self._flush()

    def _flush(self) -> None:
        while not self._silent and (body := self.outbox.take()) is not None:
            try:
                self._send(Kind.CONTROL, body)
            except EncodeError:
                # With it, starts and ends of others are lost, who would wait for ever.
                self._fall_silent("client_fault")

    def _send(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> None:
        if self._silent:
            return
        try:
            sent = self._put(kind, body, generation, memory)
        except EncodeError:
            raise
        except BaseException:
            # Part of a message may be out: nothing that follows could be understood.
            self._fall_silent("client_fault")
            raise
        if not sent:
            self._fall_silent("disconnected")

    def _put(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> bool:
        head = wire.encode(
            kind,
            body,
            incarnation=self._incarnation,
            sequence=self._sent,
            generation=generation,
            tensors=len(memory),
        )
        if not self._link.send([head, *memory]):
            return False
        self._sent += 1
        return True

    def _fall_silent(self, reason: str) -> None:
        self._silent = True
        self._lose(reason)
