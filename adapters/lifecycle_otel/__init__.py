"""OpenTelemetry spans of requests: `Spans`, with the names of the GenAI conventions.

Only the API of OpenTelemetry is needed. Without a configured SDK nothing is recorded.
"""

from __future__ import annotations

try:
    import opentelemetry as _opentelemetry  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle_otel needs {error.name}; pip install "anyio-lifecycle[otel]"',
        name=error.name,
    ) from None

from lifecycle_otel._spans import Spans

__all__ = ("Spans",)

Spans.__module__ = __name__
