"""The errors of the engine link; engine death itself is `lifecycle.EngineLost`."""

from __future__ import annotations

from lifecycle import LifecycleError


class ProtocolError(LifecycleError):
    """A frame broke the wire format; what it said was not acted upon."""


class EncodeError(ProtocolError):
    """A message cannot be put on the wire; nothing of it was sent.

    Attributes:
        code: ``"too_large"``, ``"unencodable"`` or ``"no_memory"``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestRejected(LifecycleError):
    """A request was refused before it ran; there is nothing to end.

    A backend raises it from ``start`` in the engine process; ``start`` of the client
    raises it again in the API process.

    Attributes:
        code: One word for metrics and status codes.
        message: A sentence for the sender of the request.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class EngineFailed(LifecycleError):
    """The engine lives, but gave up on this one request while it ran.

    Attributes:
        code: One word for metrics and status codes.
        message: A sentence about what went wrong.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
