"""Engines on Ray actors, for many machines and GPUs.

`RayEngine` is `lifecycle_zmq.ZmqEngine` for a cluster: the same calls, the same
promises, each replica an actor that runs any `lifecycle_zmq.Backend`.
"""

# A map of the package; each line imports those above it.
#
#   _results                 what a call to an actor returned, for asyncio and trio
#   _actor                   the engine's side: a backend behind push and pull
#   _link                    the API process's end of one actor
#   _placement               what a replica takes, and where; the cluster
#   _replica, _routes        one actor after another; who gets which request
#   engine                   all replicas

from __future__ import annotations

try:
    import numpy as _numpy  # noqa: F401, ICN001
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle_ray needs {error.name}; pip install "anyio-lifecycle[ray]"',
        name=error.name,
    ) from None

from ._placement import Placement
from .engine import RayEngine

__all__ = ("Placement", "RayEngine")

# Tracebacks and logs name what users import, not where it happens to live.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
