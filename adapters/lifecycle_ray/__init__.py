"""Engines on Ray actors, for many machines and GPUs.

`RayEngine` is `lifecycle_zmq.ZmqEngine` for a cluster, with the same methods and
guarantees. Each replica is an actor that runs any `lifecycle_zmq.Backend`.

Modules, each of which imports only those above it::

    placement  resources of a replica; joining the cluster
    replica    one actor with its backend and its client
    router     chooses the replica of each request
    engine     RayEngine: all replicas
"""

from __future__ import annotations

try:
    import numpy as _numpy  # noqa: F401, ICN001
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle_ray needs {error.name}; pip install "anyio-lifecycle[ray]"',
        name=error.name,
    ) from None

from lifecycle_ray.placement import Placement

from .engine import RayEngine

__all__ = ("Placement", "RayEngine")

# Tracebacks and logs show the names that users import.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
