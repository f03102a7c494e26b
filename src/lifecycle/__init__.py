"""Request lifecycle middleware for servers that stream from LLMs and multimodal models.

Admission control by slots and bytes, payloads that are freed as soon as the engine has
them, and clean-up exactly once when a client disconnects, a deadline passes or the
engine is lost; on asyncio and trio.
"""

# A map of the package; arrows point to what a module imports.
#
#   _decorators                                      managed, scrub
#     -> _managed_stream, _signatures                their streams, their types
#   _sessions -> _session -> _start                  sessions, supervised starts
#     -> _gate -> _lease, _queues, _lock             admission control
#     -> _stream -> _closing                         deadlines, closing a source whole
#     -> _payload                                    payloads in boxes
#   _thread_iterator                                 blocking generators in threads
#   _eventloop, _exceptions, _validation, events     the floor
#   debug, lowlevel, testing                         imported on demand

from __future__ import annotations

from . import events
from ._decorators import managed, scrub
from ._exceptions import (
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
from ._gate import Gate
from ._gate_statistics import GateStatistics
from ._lease import Lease
from ._payload import Payload, strip
from ._session import Session
from ._sessions import SessionRegistry, SessionStatistics
from ._stream import Stream
from ._thread_iterator import consumer_gone, in_thread

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
    "consumer_gone",
    "events",
    "in_thread",
    "managed",
    "scrub",
    "strip",
)

# Tracebacks and logs name what users import, not where it happens to live.
for _public in map(globals().__getitem__, __all__):
    if hasattr(_public, "__module__"):
        _public.__module__ = __name__
del _public
