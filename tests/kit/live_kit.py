"""The server process of `live_app`, and clients that read nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CANARY = "canary-5d1f"
KIT = Path(__file__).parent


@contextlib.contextmanager
def live_server() -> Iterator[int]:
    """Run the application with all the faults; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        argv = [sys.executable, "-m", "uvicorn", "--fd", str(listener.fileno())]
        argv += ["--log-level", "critical", "--lifespan", "off", "live_app:app"]
        process = subprocess.Popen(
            argv,
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": f"{KIT}"},
        )
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def asked(
    port: int, path: str, *headers: str, source: str = "127.0.0.1"
) -> Iterator[socket.socket]:
    """A client at *source* that has sent a request, and reads nothing."""
    there = ("127.0.0.1", port)
    with socket.create_connection(there, source_address=(source, 0)) as connection:
        head = [f"POST {path}?key={CANARY} HTTP/1.1", "host: here", *headers]
        head += [f"authorization: Bearer {CANARY}", f"content-length: {len(CANARY)}"]
        connection.sendall("\r\n".join([*head, "", CANARY]).encode())
        yield connection
