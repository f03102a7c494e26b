"""The log of an admission that only counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

import anyio

from lifecycle_asgi.lanes import Lane

_SECONDS_BETWEEN_SUMMARIES: Final = 60.0


class ShadowLog:
    """Says in the log that no request is refused, and how many would have been."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
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
        lanes = self._lanes
        counts = {lane.name: lane.statistics().over_limit for lane in lanes}
        if counts != self._seen and any(counts.values()):
            self._next = now + _SECONDS_BETWEEN_SUMMARIES
            self._seen = counts
            names = (name.removeprefix("admission-") for name in counts)
            pairs = zip(counts.values(), names, strict=True)
            shown = ", ".join(f"{count} in {name}" for count, name in pairs)
            self._log.warning("Admission would have refused or delayed %s", shown)
