"""The server's socket, and the memory of what it receives."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import zmq

from . import wire

# Shorter parts lie in a receive buffer of libzmq that they share and keep alive.
_COPIED_BELOW = 16 * 2**10


def listening(
    context: zmq.Context[Any], endpoint: str, descriptor: int | None = None
) -> zmq.Socket[bytes]:
    """Return a ROUTER that listens on `endpoint` and never waits for a client.

    Args:
        context: Owns the socket.
        endpoint: The address.
        descriptor: Of a socket that listens there already, if one was inherited.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    try:
        for option, value in _options().items():
            socket.setsockopt(option, value)
        if descriptor is not None:
            socket.setsockopt(zmq.USE_FD, descriptor)
        socket.bind(endpoint)
    except BaseException:
        socket.close(0)
        raise
    return socket


def own(frames: Sequence[zmq.Frame]) -> list[wire.Buffer]:
    """Return the memory of `frames`, which keeps nothing else alive."""
    return [
        frame.buffer if len(frame) >= _COPIED_BELOW else bytearray(frame.buffer)
        for frame in frames
    ]


def _options() -> dict[int, int]:
    options: dict[int, int] = {
        zmq.LINGER: 0,
        # A client that is gone is an error to be told of, not a message to be lost.
        zmq.ROUTER_MANDATORY: 1,
        # Bounded by the streams that were admitted; a full queue would lose a DONE.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: wire.MAX_TENSOR_BYTES,
    }
    if sys.platform == "linux":
        # The directory keeps other users out already; this does where it was opened.
        options[zmq.IPC_FILTER_UID] = os.getuid()
    return options
