"""How soon an application hears that its client left: every server, every case.

    python tests/kit/servers.py [--repeat 5] [--write docs/reference/servers.md]

Starts each server that is installed, with `probe_app`, and lets real clients leave. The
table tells the median of the milliseconds from the client's close to the end of the
application's work, without the middleware and with it. The tests hold the latter to
a bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STACKS = ("plain", "above", "below")
FORMS = {
    "stream": "stream that waits",
    "fast": "stream that never waits",
    "handler": "handler, no stream",
}
LEAVES = ("close", "reset", "half-close")
MARKS = ("<!-- measured -->\n", "<!-- /measured -->")
_PATIENCE = 20.0
# Without the middleware much never ends, and somebody waits for the table.
_BARE_PATIENCE = 2.0
_REQUEST = "POST /{form} HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\nbody"


@dataclass(frozen=True, slots=True)
class Kind:
    """A server and how it is started; ``{port}`` and ``{app}`` are filled in.

    Attributes:
        name: What the table calls it.
        package: Distribution that has to be installed.
        argv: Arguments of the interpreter.
        deaf: Forms that it does not tell the end of before they have ended.
    """

    name: str
    package: str
    argv: tuple[str, ...]
    deaf: frozenset[str] = frozenset()

    @property
    def installed(self) -> bool:
        """Whether this interpreter has it."""
        return util.find_spec(self.package) is not None


def _uvicorn(http: str) -> tuple[str, ...]:
    quiet = ("--log-level", "critical", "--http", http)
    return ("-m", "uvicorn", "--port", "{port}", *quiet, "probe_app:{app}")


def _hypercorn(worker: str) -> tuple[str, ...]:
    return (
        "-m",
        "hypercorn",
        "-k",
        worker,
        "-b",
        "127.0.0.1:{port}",
        "probe_app:{app}",
    )


KINDS = (
    Kind("uvicorn, h11", "uvicorn", _uvicorn("h11")),
    Kind("uvicorn, httptools", "httptools", _uvicorn("httptools")),
    Kind("hypercorn, asyncio", "hypercorn", _hypercorn("asyncio")),
    Kind("hypercorn, trio", "hypercorn", _hypercorn("trio")),
    Kind(
        "granian",
        "granian",
        ("-m", "granian", "--interface", "asgi", "--port", "{port}", "probe_app:{app}"),
    ),
    Kind(
        "daphne",
        "daphne",
        ("-m", "daphne", "-p", "{port}", "probe_app:{app}"),
        # It takes all there is into memory first, so the work ends before.
        deaf=frozenset({"fast"}),
    ),
)


class Server:
    """A server that runs, and what its applications wrote down."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self._log = log

    def leave(
        self, form: str, how: str, patience: float = _PATIENCE
    ) -> tuple[float, bool]:
        """Ask for work, leave, and return the seconds until it ended, and `gone`.

        Raises:
            TimeoutError: The work did not end.
        """
        self._log.write_text("")
        with socket.create_connection(("127.0.0.1", self.port), 5) as peer:
            peer.sendall(_REQUEST.format(form=form).encode())
            if form == "handler":
                self._wait("works", _PATIENCE)
            else:
                peer.recv(1000)
            left = time.monotonic()
            if how == "half-close":
                peer.shutdown(socket.SHUT_WR)
                _read_out(peer, patience)
            elif how == "reset":
                linger = struct.pack("ii", 1, 0)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        ended = self._wait("ended", patience)
        return ended["at"] - left, ended["gone"]

    def _wait(self, what: str, patience: float) -> dict[str, Any]:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for line in self._log.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (note := json.loads(line))["what"] == what:
                    return note
            time.sleep(0.001)
        raise TimeoutError(what)


def _read_out(peer: socket.socket, patience: float) -> None:
    peer.settimeout(patience)
    with contextlib.suppress(OSError):
        while peer.recv(65536):
            pass


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def running(kind: Kind, stack: str) -> Iterator[Server]:
    """Start *kind* with one stack of middleware, and end it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log")
        log.touch()
        paths = (Path(__file__).parent, ROOT / "src", ROOT / "adapters")
        env = {
            **os.environ,
            "PROBE_LOG": str(log),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        argv = [part.format(port=port, app=stack) for part in kind.argv]
        said = Path(directory, "said")
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *argv],
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            _wait_up(port, process, said)
            yield Server(port, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait(10)


def _wait_up(port: int, process: subprocess.Popen[bytes], said: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 5) as peer,
        ):
            peer.sendall(b"GET /up HTTP/1.1\r\nhost: here\r\n\r\n")
            if peer.recv(100).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.02)
    raise RuntimeError(f"the server does not come up: {said.read_text()[-2000:]}")


def measure(kind: Kind, form: str, repeat: int) -> str:
    """Return the median of the milliseconds over all stacks and ways to leave."""
    if form in kind.deaf:
        return "ends before"
    taken: list[float] = []
    for stack in STACKS:
        with running(kind, stack) as server:
            for how in LEAVES * repeat:
                seconds, gone = server.leave(form, how)
                assert gone, (kind.name, stack, form, how)
                taken.append(1000 * seconds)
    return f"{statistics.median(taken):.1f} ms, at most {max(taken):.1f}"


def measure_bare(kind: Kind, form: str) -> str:
    """Return the milliseconds without the middleware, once."""
    with running(kind, "bare") as server:
        try:
            seconds, _ = server.leave(form, "close", _BARE_PATIENCE)
        except TimeoutError:
            return f"not within {_BARE_PATIENCE:g} s"
    return f"{1000 * seconds:.1f} ms"


def table(repeat: int) -> str:
    """Return the table as Markdown, with the versions that it is about."""
    lines = ["| server | work | without | with |", "| --- | --- | ---: | ---: |"]
    versions = {"Python": platform.python_version()}
    for kind in filter(lambda each: each.installed, KINDS):
        package = kind.package if kind.package != "httptools" else "uvicorn"
        versions[package] = metadata.version(package)
        for form, words in FORMS.items():
            print(f"{kind.name}: {words}", file=sys.stderr)
            bare, heard = measure_bare(kind, form), measure(kind, form, repeat)
            lines.append(f"| {kind.name} | {words} | {bare} | {heard} |")
    seen = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, "", f"Measured with {seen}.", ""])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = table(options.repeat)
    print(text)
    if options.write is not None:
        page = options.write.read_text()
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
        options.write.write_text(before + MARKS[0] + text + MARKS[1] + after)


if __name__ == "__main__":
    main()
