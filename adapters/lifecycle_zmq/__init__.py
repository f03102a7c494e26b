"""Engines in another process.

`ZmqEngine` is the API process's side: it spawns the engine, hands requests to it,
streams their items and replaces it when it dies. `EngineServer` is the engine
process's side, around whatever implements `Backend`.
"""

# A map of the package; each line imports those above it.
#
#   _errors, _hand_off                    refusals; giving a payload away
#   _regions, _memory, _views, _block
#   arena                                 memory for payloads, as the client has it
#   _plain, _items, _tensors              values, items and memory as bytes
#   _arena_view                           the arena as the engine sees it
#   _schema, _tick_form, wire             messages
#   transport                             what carries messages, for both ends
#   _slot, _streams, _table, _outbox      what the client knows, without I/O
#   _parcel, _passing                     memory of tensors that is passed
#   _lodging, _carrier                    tensors of a request to where the engine is
#   _link, _address                       ZeroMQ's end here; what an engine is told
#   client                                the API process's end of any link
#   _frames, _writer                      messages in a stream of bytes
#   _pair, _rendezvous                    how the two processes meet; a pair, both ends
#   _page, _lock, _proc, _watch           how an engine is doing, without the link
#   process, _liveness                    one process; what it shows
#   life, _incarnation                    one incarnation, of any kind; of processes
#   _restarts, _supervisor, supervised    one incarnation after another
#   engine                                of processes
#   _backend, _held, _tick, _books        what the server knows, without a socket
#   _delivery, _loans                     who gets what when
#   _ends, _starts                        what becomes of a START, and of an END
#   _parent, _pulse                       what its process owes to its parent
#   loop, _router, server                 its loop; its socket; its process's end
#   bell, queued, thread                  the same in a thread: no socket, no process
#   _beat, _running, generators           a backend of one async generator per request

from __future__ import annotations

try:
    import msgpack as _msgpack  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle_zmq needs {error.name}; pip install "anyio-lifecycle[zmq]"',
        name=error.name,
    ) from None

from ._arena_view import ArenaView
from ._backend import Backend, Finish, Merge, Output
from ._errors import EncodeError, EngineFailed, ProtocolError, RequestRejected
from ._parent import exit_with_parent
from ._restarts import Restarts
from ._supervisor import Health, Supervisor
from .arena import Arena, ArenaFull, ArenaStatistics
from .client import EngineClient
from .engine import ZmqEngine
from .generators import GeneratorBackend
from .loop import EngineLoop
from .server import EngineServer
from .supervised import SupervisedEngine
from .thread import ThreadEngine

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
