"""One request and its response, between a server and an application."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel

from lifecycle_asgi._inbox import DISCONNECT, Inbox
from lifecycle_asgi._progress import Progress
from lifecycle_asgi._request import RequestScope
from lifecycle_asgi._types import Message, Receive, Send

# More than a source has ready when its client leaves, and longer than it takes to get
# rid of that; one that works for each message is not to go on for a hundred of them.
_MOST_DROPPED = 100
_DROPPED_SECONDS = 0.005
# For an application that listens itself, in tasks that no cancellation here reaches.
_OWN_WAY_SECONDS = 1.0
# Between two turns of the loop: at each, the layers above the body stand in a send.
_TURN_EVERY = 16
_TURN_SECONDS = 0.002


class Exchange:
    """What `LifecycleMiddleware` keeps for one request.

    Only somebody who always waits in ``receive`` hears that the client left, and
    two readers of one ``receive`` steal from each other; so one task owns it
    (`read`), and the application is given `receive` and `send` of this object.

    The object holds no bound method of its own: as a cycle it would keep request
    bodies alive until the collector runs.

    Args:
        receive: The server's.
        send: The server's.
        read_ahead: Bytes of body to read before the application asks. A
            disconnect behind a body that nobody reads is heard no earlier than
            the body is read; no server in use tells it earlier.
    """

    __slots__ = (
        "_dropped",
        "_inbox",
        "_receive",
        "_send",
        "_sent",
        "_since",
        "progress",
        "reading",
        "request",
        "work",
    )

    def __init__(self, receive: Receive, send: Send, *, read_ahead: int) -> None:
        self._receive = receive
        self._send = send
        self._inbox = Inbox(read_ahead)
        self._dropped = 0
        self._sent = 0
        # When the loop had a turn, or the first message was dropped.
        self._since = time.monotonic()
        self.progress = Progress()
        self.request = RequestScope()
        self.work = anyio.CancelScope()
        self.reading = anyio.CancelScope()

    async def read(self) -> None:
        """Read until the client has left, the server's ``receive`` failed or `stop`.

        Cancellation:
            Ends the reading. What was read stays readable.
        """
        error = None
        with self.reading:
            try:
                await self._read()
            except Exception as failure:  # noqa: BLE001 - raised where it is read
                error = failure
        self._inbox.close(error)

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == DISCONNECT:
                await self._disconnect()
                return
            self._inbox.put(message)
            more = message.get("more_body", False)
            del message  # the next wait may last as long as the response
            if more:  # behind the last part nothing comes but the client's leaving
                await self._inbox.room()

    async def _disconnect(self) -> None:
        if not self.progress.complete:
            self.request.leave()
            # First: whoever waits for this has it before it is cancelled.
            self._inbox.close()
            if self._inbox.elsewhere:  # as before: who was woken has had no turn yet
                # Django and vLLM wait for two tasks of their own, and end the one when
                # the other hears this. Cancelled in that wait, they would leave both.
                await anyio.sleep(_OWN_WAY_SECONDS)
            self.work.cancel(reason="the client left")

    async def receive(self) -> Message:
        """The application's ``receive``; see `Inbox.get`.

        Cancellation:
            Takes no message along.
        """
        return await self._inbox.get()

    async def send(self, message: Message) -> None:
        """The application's ``send``.

        Cancellation:
            The client's leaving is delivered where the application waits next, as in
            the generator of a body, whose ``finally`` then runs. In here that
            generator would stand at its ``yield``, where no framework closes it. So
            the first messages for a client who has left are dropped, and the loop's
            turn, which a stream that never suspends needs to hear of it, is shielded.
            After those, or a few milliseconds, and for whoever else cancels, it is a
            checkpoint.
        """
        if self.request.client_gone and self._drops():
            return
        await anyio.lowlevel.checkpoint_if_cancelled()
        self.progress.note(message)
        await self._send(message)
        self._sent += 1
        if self.progress.complete:
            self.stop()
        elif (
            self._sent % _TURN_EVERY == 0
            or time.monotonic() - self._since > _TURN_SECONDS
        ):
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self._since = time.monotonic()

    def _drops(self) -> bool:
        if not self._dropped:
            self._since = time.monotonic()
        self._dropped += 1
        late = time.monotonic() - self._since > _DROPPED_SECONDS
        return self._dropped <= _MOST_DROPPED and not late

    def stop(self) -> None:
        """End the reading: the response is complete or the application has ended."""
        self._inbox.close()
        self.reading.cancel()
