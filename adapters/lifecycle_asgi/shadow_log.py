"""The log of an admission that only counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Final

import anyio

from lifecycle_asgi.lanes import Lane

_SECONDS_BETWEEN_SUMMARIES: Final = 60.0


class ShadowLog:
    """Says in the log that nobody is refused, and who would have been.

    Args:
        lanes: The lanes by their names.
    """

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        self._seen: dict[str, int] = {}
        self._next = -math.inf
        self._log = logging.getLogger("lifecycle")
        self._log.warning(
            "Admission refuses no request and only counts, as its setting shadow is "
            "on; turn it off to limit requests"
        )

    def summarise(self) -> None:
        """Log the counts that have changed, once a minute at most."""
        now = anyio.current_time()
        if now < self._next:
            return
        counts = {n: lane.statistics().over_limit for n, lane in self._lanes.items()}
        if counts != self._seen and any(counts.values()):
            self._next = now + _SECONDS_BETWEEN_SUMMARIES
            self._seen = counts
            shown = ", ".join(f"{count} in {name}" for name, count in counts.items())
            self._log.warning("Admission would have refused or delayed %s", shown)
