"""Events as attributes, in the words of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lifecycle_asgi.events import RequestEnded

# What the conventions have a word for; all else is ours, below `lifecycle.`.
_COUNTS: Final = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "choices": "gen_ai.request.choice.count",
}
FAILURES: Final = frozenset({"failed", "deadline", "engine_lost"})


def of_end(event: RequestEnded) -> Mapping[str, str | int]:
    """The attributes of a request that has ended."""
    found: dict[str, str | int] = {"lifecycle.outcome": event.outcome}
    if event.status is not None:
        found["http.response.status_code"] = event.status
    if event.session is not None:
        found["lifecycle.session"] = event.session
    kind = event.error or (event.outcome if event.outcome in FAILURES else None)
    if kind is not None:
        found["error.type"] = kind
    for name, count in event.counts.items():
        found[_COUNTS.get(name, f"lifecycle.{name}")] = count
    return found
