"""What the engine speaks with its link: outputs, endings and refusals.

The one place where the scheduler meets the transport, so that a scheduler under
test, or behind another transport, needs no other change than here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


class RequestRejected(Exception):
    """The backend refuses a request before it has taken anything of it.

    Attributes:
        code: One word for clients and metrics.
        message: The value, the limit and the remedy; never payload content.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended.

    Attributes:
        reason: ``"completed"``, ``"cancelled"`` or ``"failed"``.
        code: One word for metrics and status codes, of a failure.
        message: A sentence without any of the request's content, of a failure.
    """

    reason: Literal["completed", "cancelled", "failed"]
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Output:
    """What one stream gets from one step."""

    key: str
    items: Sequence[Any] = ()
    finish: Finish | None = None
