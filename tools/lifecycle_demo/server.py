"""The server under test: a process of its own, seen only from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

START_LIMIT = 120.0
"""Seconds for the server to listen and its engine to load."""

STOP_LIMIT = 20.0


class ServerFailed(RuntimeError):
    """The server did not start, or ended by itself."""


@dataclass(slots=True)
class Server:
    """A running server.

    Attributes:
        port: Where it listens, on the loopback address.
        admin: The port of the operator's pages.
        process: Its process, the parent of the engine.
        log: What it wrote to stdout and stderr.
    """

    port: int
    admin: int
    process: anyio.abc.Process
    log: Path

    @property
    def url(self) -> str:
        """The address without a path."""
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON that *path* of the operator's pages shows.

        Raises:
            ServerFailed: The server does not listen any more.
        """
        try:
            _, body = await anyio.to_thread.run_sync(_get, self.admin, path)
        except OSError as error:
            raise ServerFailed(str(error)) from None
        shown: dict[str, Any] = json.loads(body)
        return shown

    async def wait_ready(self) -> None:
        """Wait until an engine is there.

        Raises:
            ServerFailed: The process ended, or took too long; with the end of its log.
        """
        with anyio.move_on_after(START_LIMIT):
            while self.process.returncode is None:
                try:
                    code, _ = await anyio.to_thread.run_sync(_get, self.port, "/ready")
                except OSError:
                    code = 0  # not listening yet
                if code == http.HTTPStatus.OK:
                    return
                await anyio.sleep(0.1)
        raise ServerFailed(f"the server did not become ready:\n{self.log_tail()}")

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def resident(self) -> int | None:
        """Return the bytes of memory that the API process holds now."""
        return _memory(self.process.pid, "VmRSS")

    def peak_resident(self) -> int | None:
        """Return the most bytes of memory that the API process ever held."""
        return _memory(self.process.pid, "VmHWM")

    async def stop(self) -> int | None:
        """Ask the server to end; return its exit status, ``None`` if it would not."""
        self.process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_LIMIT):
            return await self.process.wait()
        return None


@asynccontextmanager
async def running(arguments: Sequence[str]) -> AsyncIterator[Server]:
    """Start ``lifecycle serve`` on a free port; leave nothing behind."""
    port, admin = _free_port(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "lifecycle_engine.cli", "serve"]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        command += ["--admin-listen", f"127.0.0.1:{admin}"]
        with log.open("wb") as file:
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # ^C is for the demo, which then stops the server in good order.
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            yield Server(port, admin, process, log)
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()


def _get(port: int, path: str) -> tuple[int, bytes]:
    # No HTTP library: a proxy from the environment has no say in a demo.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def kill(pid: int) -> None:
    """End a process as the kernel's memory killer would: at once, without a word."""
    os.kill(pid, signal.SIGKILL)


def lives(pid: int | None) -> bool:
    """Return whether the process *pid* is there."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return pid is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _memory(pid: int, row: str) -> int | None:
    """Return a row of ``/proc/PID/status`` in bytes, where there is such a file."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{row}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
