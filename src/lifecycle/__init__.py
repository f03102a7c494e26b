"""Request lifecycle management for streaming servers.

A request's resources are admitted before they are created, handed off exactly
once, gone from this process the moment they are handed off, and ended exactly
once whatever happens.
"""

# A map of the package; arrows point to what a module imports.
#
#   _sessions -> _session -> _start -> _payload          the registry and its tasks
#                   |-> _watchdog -> _stream             deadlines, ends of iteration
#   _gate -> _books -> _lease -> _ledger, _park          admission and its line
#     |-> _fair   |-> _monitor, _refusal                 one at a time; when to retry
#   _decorators -> _stream, _payload, _outcome           the same as decorators
#   events, _errors                                      the floor
#   observers, testing                                   imported on demand

from __future__ import annotations

from . import events
from ._decorators import managed, scrub
from ._errors import (
    AdmissionTimeout,
    CostTooLarge,
    EngineLost,
    GateClosed,
    GateFull,
    LifecycleError,
    Refused,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    StartTimeout,
    StreamTimeout,
)
from ._gate import Gate, GateStatistics
from ._lease import Lease
from ._payload import Payload, strip
from ._session import Session
from ._sessions import SessionRegistry, SessionStatistics
from ._stream import Stream

__all__ = (
    "AdmissionTimeout",
    "CostTooLarge",
    "EngineLost",
    "Gate",
    "GateClosed",
    "GateFull",
    "GateStatistics",
    "Lease",
    "LifecycleError",
    "Payload",
    "Refused",
    "Session",
    "SessionEnded",
    "SessionExists",
    "SessionNotFound",
    "SessionRegistry",
    "SessionStatistics",
    "StartTimeout",
    "Stream",
    "StreamTimeout",
    "events",
    "managed",
    "scrub",
    "strip",
)

# Tracebacks and logs name what users import, not where it happens to live.
for _public in map(globals().__getitem__, __all__):
    if hasattr(_public, "__module__"):
        _public.__module__ = __name__
del _public
