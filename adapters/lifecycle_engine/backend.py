"""What the engine speaks with its link: outputs, endings and refusals.

The one place where the scheduler meets the transport, so that a scheduler under
test, or behind another transport, needs no other change than here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        error: ``code`` and ``message``, only with ``"failed"``.
    """

    reason: Literal["completed", "cancelled", "failed"]
    error: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What one stream gets from one step."""

    key: str
    items: list[Any] = field(default_factory=list)
    finish: Finish | None = None
