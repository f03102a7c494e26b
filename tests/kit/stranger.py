"""Another project's server, started by its own command line, and clients of it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType

import psutil
from ports import free_port

# A guard against hanging. To import torch and a server takes a minute on an idle machine.
SECONDS = 600.0
# What no server has room for.
CLAIMED = {"content-length": str(100 << 30)}


class Client:
    """A request on a connection of its own.

    Args:
        port: Where the server listens; it is waited for.
        head: The request line and the headers.
        body: What follows.
    """

    def __init__(self, port: int, head: bytes, body: bytes) -> None:
        until = time.monotonic() + SECONDS
        while True:  # a server may listen a little after it says so
            try:
                self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
                time.sleep(0.05)
        with suppress(ConnectionError):  # refused before all of it was read
            self.socket.sendall(head + b"\r\n\r\n" + body)

    def answer(self) -> http.client.HTTPResponse:
        """Wait for the head of the answer; ``read`` returns the rest."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return response

    def leave(self) -> None:
        """Hang up, whatever has been read."""
        with suppress(OSError):  # the server was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Stranger:
    """A running server, and what it has written.

    Attributes:
        process: The first of its processes.
        port: Where it is to listen.
        said: Its lines until now.
    """

    def __init__(
        self, process: subprocess.Popen[str], port: int, stack: ExitStack
    ) -> None:
        self.process = process
        self.port = port
        self.said: list[str] = []
        self._lines = process.stdout or ()
        self._stack = stack

    def until(self, *texts: str) -> str:
        """Read on to a line with one of *texts*, or to the end; return all lines."""
        for line in self._lines:
            self.said.append(line)
            if any(text in line for text in texts):
                break
        return "".join(self.said)

    def post(self, path: str, body: bytes, **headers: str) -> Client:
        """Send JSON, and leave at the end if not before.

        Args:
            path: Of the request.
            body: All of it, whatever length is claimed.
            headers: More of them, or others.
        """
        length = {"content-length": str(len(body))}
        sent = {"host": "here", "content-type": "application/json", **length, **headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{it}: {sent[it]}" for it in sent)]
        client = Client(self.port, "\r\n".join(lines).encode(), body)
        self._stack.callback(client.leave)
        return client


def install_plugin(folder: Path, module: ModuleType, group: str) -> None:
    """Make ``register`` of a module of the kit a plug-in of what runs in *folder*."""
    name = module.__name__
    metadata = folder / f"{name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:register\n")


@contextmanager
def launched(
    folder: Path, *argv: str, seconds: float = SECONDS, **environment: str
) -> Iterator[Stranger]:
    """Start a server in a folder, and end it and all its processes.

    Args:
        folder: Where it runs; Python imports from it, and from the kit. It may have a
            ``sitecustomize`` of the test.
        argv: The command line, in which ``PORT`` becomes a free port.
        seconds: After these it is killed, against hanging.
        environment: Variables beside those of the tests.
    """
    startup = folder / "sitecustomize.py"
    if not startup.exists():
        startup.write_text("import torchvision_on_cpu\n")
    port = free_port()
    kit = Path(__file__).parent
    path = [str(folder), str(kit), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [each.replace("PORT", str(port)) for each in argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def end() -> None:
        workers = []
        with suppress(psutil.NoSuchProcess):
            # Some have a session of their own.
            workers = psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in workers:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    guard = threading.Timer(seconds, end)
    guard.start()
    try:
        with ExitStack() as stack:
            yield Stranger(process, port, stack)
    finally:
        guard.cancel()
        end()
        process.communicate(timeout=60)
