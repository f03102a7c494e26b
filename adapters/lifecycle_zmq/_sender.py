"""What the client says to the engine, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._errors import EncodeError
from ._link import Link
from ._outbox import SMALL_REQUEST, Outbox
from ._streams import StreamState
from .wire import Kind


class Sender:
    """Says at once what cannot wait, and the rest once a turn of the event loop.

    Made in the event loop that it belongs to.

    Args:
        link: The socket.
        lose: Told in one word why nothing can be said any more.

    Attributes:
        outbox: What will be said at the end of this turn.
    """

    __slots__ = ("_link", "_lose", "_silent", "outbox")

    def __init__(self, link: Link, lose: Callable[[str], None]) -> None:
        self._link = link
        self._lose = lose
        self._silent = False
        self.outbox = Outbox()

    async def run(self) -> None:
        """Send what the outbox has gathered, for ever.

        Cancellation: what was not sent yet stays unsaid.
        """
        while True:
            await self.outbox.wait()
            self._flush()

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
            return
        body = {
            "key": state.key,
            "window": state.window,
            "request": request,
            "tensors": described,
        }
        self.say(Kind.START, body, generation=state.generation, memory=memory)

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

    def _flush(self) -> None:
        while not self._silent and (body := self.outbox.take()) is not None:
            self._send(Kind.CONTROL, body)

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
            sent = self._link.say(kind, body, generation=generation, memory=memory)
        except EncodeError:
            raise
        except BaseException:
            # Part of a message may be out: nothing that follows could be understood.
            self._fall_silent("client_fault")
            raise
        if not sent:
            self._fall_silent("disconnected")

    def _fall_silent(self, reason: str) -> None:
        self._silent = True
        self._lose(reason)
