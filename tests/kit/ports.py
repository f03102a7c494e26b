"""Ports for servers that cannot take one from the kernel, or do not say which."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Ray's workers have those below. From 32768 on, Linux gives ports to connections and to
# listeners that ask for any, so that one from there may be gone before a server has it.
PORTS = range(20_000, 32_768)
LAST = Path(tempfile.gettempdir(), f"lifecycle-tests-{os.getuid()}.port")


def free_port() -> int:
    """Return a port that nothing listens on, and that nobody else will be given.

    All processes of tests take turns: of two that draw the same number, the second one
    would talk to the server of the first.
    """
    while True:
        port = _next_port()
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


def _next_port() -> int:
    with LAST.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or b"0") + 1
        file.truncate(0)
        file.write(b"%d" % number)
    return PORTS[number % len(PORTS)]
