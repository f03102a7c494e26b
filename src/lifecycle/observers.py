"""Observers that write events down; each back end is imported when it is used."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from .events import Event, Observer

_QUIET = frozenset({"LeaseGranted", "LeaseReleased", "LeaseSettled", "PayloadReleased"})


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
        name, fields = type(event).__name__, asdict(event)
        log = logger.debug if name in _QUIET else logger.info
        if name == "EndFailed" or fields.get("lost"):
            log = logger.warning
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        rounded = {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in fields.items()
        }
        log(f"lifecycle.{snake}", **rounded)

    return observe
