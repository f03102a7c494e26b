"""Prometheus metrics of gates, sessions and requests.

Modules::

    _collectors  statistics of gates and sessions, read at each scrape; request counters
    _metrics     Metrics: an observer, and the registry of all metrics

Labels are names of gates and fixed words. So the number of series is small, however
many requests there are, and no label can contain data of a request.
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
