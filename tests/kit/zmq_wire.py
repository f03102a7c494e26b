"""Messages of the engine link, for tests that speak to it as a raw peer."""

from __future__ import annotations

from lifecycle_zmq import protocol as wire
from lifecycle_zmq.codec import pack_request, pack_tokens
from lifecycle_zmq.protocol import Kind
from lifecycle_zmq.transport.framing import FrameReader
from lifecycle_zmq.transport.socketpair import SocketPairServer
from lifecycle_zmq.transport.zmq import ZmqClientTransport

__all__ = (
    "FrameReader",
    "Kind",
    "SocketPairServer",
    "ZmqClientTransport",
    "pack_request",
    "pack_tokens",
    "wire",
)
