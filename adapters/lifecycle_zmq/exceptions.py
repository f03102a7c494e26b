"""The exceptions of the engine link."""

from __future__ import annotations

import sys
import traceback

from lifecycle import LifecycleError
from lifecycle.lowlevel import clear_traceback_frames


class ProtocolError(LifecycleError):
    """A frame broke the wire format; it was not acted upon.

    Attributes:
        sender: The transport's name of the client that sent it; ``None`` if unknown.
    """

    sender: bytes | None = None


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
    """The engine is alive, but failed this one request while it ran.

    Attributes:
        code: One word for metrics and status codes.
        message: A sentence about what went wrong.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def log_exception(source: str, error: BaseException) -> None:
    """Print an exception's type and traceback to standard error; clear its frames.

    The message of the exception and the locals of its frames are left out: they may
    hold a prompt.
    """
    sys.stderr.write(f"{source} raised {type(error).__name__}\n")
    traceback.print_tb(error.__traceback__)
    clear_traceback_frames(error)
