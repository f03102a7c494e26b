"""Prometheus metrics of gates and sessions.

Map of the package::

    _counts    what gates and registries hold, read at each scrape
    _requests  what became of requests, counted
    _metrics   Metrics: that, and how long things took, told by events

Labels are names of gates and fixed words, so there are few series however many
requests there are, and none can hold anything of a request.
"""

from __future__ import annotations

try:
    import prometheus_client as _prometheus_client  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle_metrics needs {error.name}; pip install "anyio-lifecycle[metrics]"',
        name=error.name,
    ) from None

from lifecycle_metrics._metrics import Metrics

__all__ = ("Metrics",)

Metrics.__module__ = __name__
