"""Observers that write events down; each back end is imported when it is used."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .events import Event, Observer

_QUIET = frozenset({"LeaseGranted", "LeaseReleased", "LeaseSettled", "PayloadReleased"})
_LOUD = frozenset({"EndFailed"})


def structlog_observer(logger: Any = None) -> Observer:
    """Log each event with structlog, as ``lifecycle.session_closed`` and so on.

    What happens several times a request is logged at level debug, what needs
    somebody's attention at warning, the rest at info.

    Args:
        logger: A structlog logger; by default a new one named ``lifecycle``.

    Raises:
        ImportError: structlog is not installed.
    """
    if logger is None:
        try:
            import structlog
        except ImportError as error:
            raise ImportError(
                "structlog_observer needs structlog; install anyio-lifecycle[structlog]"
            ) from error
        logger = structlog.get_logger("lifecycle")

    def observe(event: Event) -> None:
        name = type(event).__name__
        fields = {
            field.name: _rounded(getattr(event, field.name))
            for field in dataclasses.fields(event)
        }
        lost = fields.get("lost") is True
        level = (
            logger.warning
            if lost or name in _LOUD
            else logger.debug
            if name in _QUIET
            else logger.info
        )
        level(f"lifecycle.{_snake(name)}", **fields)

    return observe


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
