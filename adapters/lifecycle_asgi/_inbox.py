"""Messages read for an application that has not asked for them yet."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from lifecycle_asgi._types import Message

DISCONNECT = "http.disconnect"


class Inbox:
    """A bounded buffer between the one reader of ``receive`` and the application.

    Args:
        max_bytes: Bytes of body that may wait before the reader has to.

    Attributes:
        elsewhere: How many tasks wait here behind the whole body that are neither
            that of whoever made this nor in a task group of anyio.
    """

    __slots__ = (
        "_bytes",
        "_changed",
        "_error",
        "_maker",
        "_max_bytes",
        "_messages",
        "_over",
        "_whole",
        "elsewhere",
    )

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._bytes = 0
        self._over = False
        self._whole = False  # the last part of the body has been taken
        self._error: Exception | None = None
        self._maker = anyio.get_current_task().id
        self.elsewhere = 0
        # Nine hundred bytes: only where somebody waits. Of a list they are fifty, and
        # it is as short as what was read ahead.
        self._changed: anyio.Event | None = None

    def put(self, message: Message) -> None:
        """Append *message*."""
        self._messages.append(message)
        self._bytes += len(message.get("body", b""))
        self._announce()

    async def room(self) -> None:
        """Wait until less than the bound is waiting here.

        Cancellation:
            Changes nothing.
        """
        while self._bytes >= self._max_bytes:
            await self._change()

    async def get(self) -> Message:
        """The next message; behind the last one ``http.disconnect``, for ever.

        Raises:
            Exception: What the server's ``receive`` raised, once all that it
                delivered before has been read.

        Cancellation:
            Takes no message along. It is looked at first, so that the leaving of
            a client arrives as a message in shielded code, and where somebody waits
            for it: behind the whole body there is nothing else to wait for, and what
            an application does when it hears of it has to be done. Who waits for more
            of a body would have to make an error of it.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        waited = False
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._over:
                if not (waited and self._whole):
                    await anyio.lowlevel.checkpoint()
                return {"type": DISCONNECT}
            await self._listen()
            waited = True
        message = self._messages.pop(0)
        self._whole = not message.get("more_body", False)
        self._bytes -= len(message.get("body", b""))
        self._announce()
        return message

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will be put here, because of *error* if there is one."""
        self._over = True
        self._error = self._error or error
        self._announce()

    async def _listen(self) -> None:
        task = anyio.get_current_task()
        elsewhere = self._whole and task.parent_id is None and task.id != self._maker
        self.elsewhere += elsewhere
        try:
            await self._change()
        finally:
            self.elsewhere -= elsewhere

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _announce(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()
