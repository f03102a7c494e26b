"""The probe: how a client finds that a message was lost on its way."""

from __future__ import annotations

from typing import Protocol

import anyio

from lifecycle_zmq.client_streams import StreamTable

# Seconds until a client that hears nothing, or sends nothing, makes sure that no
# message was lost; doubled for an engine that is busy.
_PING_SECONDS = 0.25
_MOST_DOUBLED = 7
# Pings without an answer before the engine counts as busy.
_PROMPT_PINGS = 4


class NumberedSender(Protocol):
    """Sends messages, and numbers them."""

    sent: int

    def ping(self) -> None:
        """Send a PING, numbered like its message."""


class LossProbe:
    """Asks for a sign of the engine while something of it is awaited.

    A message that was lost shows by the number of the next one, so there has to be a
    next one in each direction. An answer that takes long proves nothing: the engine may
    be in a step.
    """

    def __init__(self, sender: NumberedSender, table: StreamTable) -> None:
        self._sender = sender
        self._table = table
        self._sent = self._received = 0
        self._confirmed = -1
        self._unanswered = 0
        # Rounds until the next PING to a busy engine.
        self._rounds = 0
        self._stopped = False

    async def run(self) -> None:
        """Send a PING whenever a direction was quiet for a while, until `stop`.

        Cancellation:
            At any time.
        """
        while not self._stopped:
            await anyio.sleep(_PING_SECONDS)
            self._probe()

    def stop(self) -> None:
        """Ask no more: nothing can be lost now.

        No cancellation, which on trio keeps the frames of its caller for a while, and
        with them the payload that was not sent.
        """
        self._stopped = True

    def _probe(self) -> None:
        sender, table = self._sender, self._table
        if table.confirmed != self._confirmed:
            # No longer busy: what is lost from now on shows as soon as ever.
            self._confirmed, self._unanswered, self._rounds = table.confirmed, 0, 0
        quiet = sender.sent == self._sent or table.received == self._received
        awaits = table.waits or table.confirmed != sender.sent - 1
        awaits = awaits and not self._stopped
        self._rounds -= 1
        # Without a first message, there is no connection yet.
        if sender.sent and quiet and awaits and self._rounds <= 0:
            doubled = min(max(0, self._unanswered - _PROMPT_PINGS), _MOST_DOUBLED)
            self._unanswered += 1
            self._rounds = 2**doubled
            sender.ping()
        self._sent, self._received = sender.sent, table.received
