"""Ports for servers that cannot take one from the kernel, or do not say which."""

from __future__ import annotations

import random
import socket

# Ray's workers have those below. From 32768 on, Linux gives ports to connections and to
# listeners that ask for any, so that one from there may be gone before a server has it.
PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port that nothing listens on, and that no connection will be given."""
    draw = random.SystemRandom()  # workers of pytest have the same seed
    while True:
        port = draw.choice(PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
