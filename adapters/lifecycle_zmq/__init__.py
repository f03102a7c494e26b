"""Engines in another process.

`ZmqEngine` is the API process's side: it spawns the engine, hands requests to it,
streams their items and replaces it when it dies. `EngineServer` is the engine
process's side, around whatever implements `Backend`.
"""

# A map of the package; each room imports from those above it, no room from below.
#
#   _errors, _hand_off, _slot    refusals; giving a payload away; waking one task
#   _options                     what is given to constructors, looked at at once
#   memory/                      payloads in memory that both processes see
#   protocol/                    values, items and messages as bytes
#   transport/                   what carries messages: a pair, ZeroMQ, queues
#   process/                     one engine process and its signs of life
#   client/                      the API process's end of any link
#   server/                      the engine's end: its loop around a backend
#   supervision/                 one incarnation after another, of any kind
#   engine, thread               engines in a process, and in a thread of this one
#
# Public is what stands below and in the reference; all else may move.

from __future__ import annotations

try:
    import msgpack as _msgpack  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle_zmq needs {error.name}; pip install "anyio-lifecycle[zmq]"',
        name=error.name,
    ) from None

from lifecycle_zmq._errors import (
    EncodeError,
    EngineFailed,
    ProtocolError,
    RequestRejected,
)
from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.engine import ZmqEngine
from lifecycle_zmq.memory.arena import Arena, ArenaFull, ArenaStatistics
from lifecycle_zmq.memory.arena_view import ArenaView
from lifecycle_zmq.process.parent import exit_with_parent
from lifecycle_zmq.server.backend import Backend, Finish, Merge, Output
from lifecycle_zmq.server.engine_server import EngineServer
from lifecycle_zmq.server.generators import GeneratorBackend
from lifecycle_zmq.server.loop import EngineLoop
from lifecycle_zmq.supervision.restarts import Restarts
from lifecycle_zmq.supervision.supervised import SupervisedEngine
from lifecycle_zmq.supervision.supervisor import Health, Supervisor
from lifecycle_zmq.thread import ThreadEngine

__all__ = (
    "Arena",
    "ArenaFull",
    "ArenaStatistics",
    "ArenaView",
    "Backend",
    "EncodeError",
    "EngineClient",
    "EngineFailed",
    "EngineLoop",
    "EngineServer",
    "Finish",
    "GeneratorBackend",
    "Health",
    "Merge",
    "Output",
    "ProtocolError",
    "RequestRejected",
    "Restarts",
    "SupervisedEngine",
    "Supervisor",
    "ThreadEngine",
    "ZmqEngine",
    "exit_with_parent",
)

# Tracebacks and logs name what users import, not where it happens to live.
# `Health` and `Merge` are aliases, which others may share.
for _name in set(__all__) - {"Health", "Merge"}:
    globals()[_name].__module__ = __name__
del _name
