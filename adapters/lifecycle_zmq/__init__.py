"""Engines in another process.

`ZmqEngine` is the API process's side: it spawns the engine, hands requests to it,
streams their items and replaces it when it dies. `EngineServer` is the engine
process's side, around whatever implements `Backend`.
"""

# A map of the package; each line imports from those above it.
#
#   exceptions                         errors of the engine link
#   shared_memory/                     memory that both processes map
#   codec, protocol                    values, items and messages as bytes
#   transport/                         socket pair, ZeroMQ, framing
#   backend                            what an engine implements
#   process, heartbeat                 one engine process and its liveness
#   tensor_copy, client_streams, client        the API process's end of a link
#   flow_control, server, generator_backend    the engine's end of a link
#   supervisor, engine, thread_engine          engines, restarted when they die
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

from lifecycle_zmq.backend import Backend, Merge, Output
from lifecycle_zmq.client import EngineClient
from lifecycle_zmq.engine import ZmqEngine
from lifecycle_zmq.exceptions import (
    EncodeError,
    EngineFailed,
    ProtocolError,
    RequestRejected,
)
from lifecycle_zmq.generator_backend import GeneratorBackend
from lifecycle_zmq.process import exit_with_parent
from lifecycle_zmq.protocol import Finish
from lifecycle_zmq.server import EngineLoop, EngineServer
from lifecycle_zmq.shared_memory.arena import Arena, ArenaFull, ArenaStatistics
from lifecycle_zmq.shared_memory.arena_reader import ArenaView
from lifecycle_zmq.supervisor import Health, Restarts, SupervisedEngine, Supervisor
from lifecycle_zmq.thread_engine import QueuedTransport, ThreadEngine
from lifecycle_zmq.transport.base import (
    AwaitedTransport,
    ClientTransport,
    Connect,
    MessageHandler,
    ServerTransport,
)

__all__ = (
    "Arena",
    "ArenaFull",
    "ArenaStatistics",
    "ArenaView",
    "AwaitedTransport",
    "Backend",
    "ClientTransport",
    "Connect",
    "EncodeError",
    "EngineClient",
    "EngineFailed",
    "EngineLoop",
    "EngineServer",
    "Finish",
    "GeneratorBackend",
    "Health",
    "Merge",
    "MessageHandler",
    "Output",
    "ProtocolError",
    "QueuedTransport",
    "RequestRejected",
    "Restarts",
    "ServerTransport",
    "SupervisedEngine",
    "Supervisor",
    "ThreadEngine",
    "ZmqEngine",
    "exit_with_parent",
)

# Tracebacks and logs name what users import, not where it happens to live.
# The others are aliases, which have no module of their own.
for _name in set(__all__) - {"Connect", "Health", "Merge", "MessageHandler"}:
    globals()[_name].__module__ = __name__
del _name
