"""OpenTelemetry spans of requests.

Map of the package::

    _attributes   events as attributes, in the words of the GenAI conventions
    _spans        Spans: an observer that makes one span a request, one a phase

The API of OpenTelemetry is all it needs: without an SDK that somebody has set up,
nothing is recorded.
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
