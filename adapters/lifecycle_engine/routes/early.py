"""Saying no before a body is read: reading and parsing it is most of what it costs."""

from __future__ import annotations

from typing import Any

from lifecycle import Gate
from lifecycle_engine.api_errors import bad_request


def refuse_encoded(scope: Any) -> None:
    """Refuse a body that its client has compressed: no bound here looks inside it.

    Raises:
        ApiError: 400 for any ``content-encoding`` but ``identity``.
    """
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            raise bad_request(
                "Compressed bodies are not read; send it without content-encoding",
                param="content-encoding",
                code="unsupported_encoding",
            )


def refuse_when_full(gate: Gate) -> None:
    """Refuse now who would be refused on arrival at a gate over requests.

    A request that may wait, or that there is room for, passes: whether it gets in is
    only decided when it is there, with its body.

    Raises:
        GateFull: There is no room, and the line is full; it counts as refused.
        GateClosed: The gate is closed.
    """
    now = gate.statistics()
    if now.max_waiting is None or now.waiting < now.max_waiting:
        return
    if now.waiting or (now.slots is not None and now.slots_in_use >= now.slots):
        gate.try_admit().release()  # which refuses, and says when to come back
