"""How far the answer to a request has come."""

from __future__ import annotations

from lifecycle_asgi._types import Message


class Progress:
    """Follows the messages of one response.

    Attributes:
        started: The response has begun: there is no other status to send.
        complete: Its last message has been handed to the server.
        status: That it began with.
    """

    __slots__ = ("_trailers", "complete", "started", "status")

    def __init__(self) -> None:
        self._trailers = False
        self.started = False
        self.complete = False
        self.status: int | None = None

    def note(self, message: Message) -> None:
        """Take *message* into account, before it is sent.

        Before and not after, since from then on the response is in the server's
        hands: a ``http.disconnect`` that arrives while the last message is being
        flushed is what servers send after every success.
        """
        kind = message["type"]
        if kind == "http.response.start":
            self.started = True
            self.status = message.get("status")
            self._trailers = bool(message.get("trailers", False))
        elif kind in ("http.response.body", "http.response.zerocopysend"):
            last = not message.get("more_body", False)
            self.complete = last and not self._trailers
        elif kind == "http.response.pathsend":
            self.complete = not self._trailers
        elif kind == "http.response.trailers":
            self.complete = not message.get("more_trailers", False)
