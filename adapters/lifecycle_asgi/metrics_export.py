"""Metrics of `Admission` where a Prometheus finds them, without code in the server."""

from __future__ import annotations

import logging
import os
from typing import Final

from prometheus_client import REGISTRY, start_http_server

from lifecycle_asgi.prometheus import Metrics

_LOG: Final = logging.getLogger("lifecycle")


def export(where: str) -> Metrics:
    """Return metrics that can be scraped from now on; a warning says where not.

    Args:
        where: ``server`` for the registry of prometheus_client, which most servers show
            at their own ``/metrics``; or ``PORT`` or ``HOST:PORT`` of a listener that
            this starts, for the life of the process.
    """
    return _in_registry() if where == "server" else _at_address(where)


def _in_registry() -> Metrics:
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _LOG.warning(
            "Admission: PROMETHEUS_MULTIPROC_DIR is set, so that this server shows "
            "waits and refusals, and not what lanes hold; give LIFECYCLE_METRICS a port"
        )
    try:
        return Metrics(REGISTRY)
    except ValueError:
        _LOG.warning(
            "Admission: this process has metrics of another Admission, which are shown "
            "instead; give LIFECYCLE_METRICS a port for those of this one"
        )
    return Metrics()


def _at_address(where: str) -> Metrics:
    metrics = Metrics()
    host, _, port = where.rpartition(":")
    try:
        start_http_server(int(port), host or "127.0.0.1", registry=metrics.registry)
    except OSError as error:
        # The server is not to end for it: another worker may have the port.
        _LOG.warning("Admission: no metrics at %s: %s", where, error.strerror or error)
    return metrics
