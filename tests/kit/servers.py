"""Whether an application hears that its client left: every server, every case.

    python tests/kit/servers.py [--repeat 5] [--write docs/reference/servers.md]

Starts each server that is installed, with `probe_app`, and lets real clients leave. The
table tells what becomes of the work, without the middleware and with it, and the
milliseconds from the client's close to its end. The tests hold the words of the table
to what they see.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from ports import free_port

ROOT = Path(__file__).parents[2]
# Where the middleware is, of `probe_app`, and what the table calls it.
STACKS = {
    "bare": "without",
    "plain": "with",
    "above": "above `BaseHTTPMiddleware`",
    "below": "below it",
}
# What never waits is last: without the middleware it keeps the server busy.
FORMS = {
    "stream": "stream that waits",
    "handler": "handler, no stream",
    "unread": "handler that waits at a gate, 4 MiB unread",
    "fast": "stream that never waits",
}
LEAVES = ("close", "reset", "half-close")
STOPS, GOES_ON, ENDS_BEFORE = "stops", "goes on", "ends before"
MARKS = ("<!-- measured -->\n", "<!-- /measured -->")
_PATIENCE = 20.0
# Without the middleware much never ends, and a test waits for the table.
_BARE_PATIENCE = 1.0
# A server without the middleware never notices these disconnects.
_UNREAD_PATIENCE = 5.0
_HEAD = "POST /{} HTTP/1.1\r\nhost: here\r\ncontent-length: {}\r\n\r\n"
_BODY, _UNREAD_BODY = b"body", bytes(4 << 20)


@dataclass(frozen=True, slots=True)
class Kind:
    """A server and how it is started; ``{port}`` and ``{app}`` are filled in.

    Attributes:
        name: What the table calls it.
        package: Distribution that has to be installed.
        argv: Arguments of the interpreter.
    """

    name: str
    package: str
    argv: tuple[str, ...]

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
    Kind("daphne", "daphne", ("-m", "daphne", "-p", "{port}", "probe_app:{app}")),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of work, and the seconds that it took to stop."""

    verdict: str
    taken_s: tuple[float, ...] = ()


class Server:
    """A server that runs, and what its applications wrote down."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self._log = log
        self._asked = 0

    def verdict(self, form: str, ways: Sequence[str], patience: float) -> Seen:
        """Ask for work, leave, and tell what becomes of it.

        Args:
            form: Of the work.
            ways: To leave, one after the other.
            patience: Seconds until it counts as going on.
        """
        if form == "fast" and self._takes_all():
            return Seen(ENDS_BEFORE)
        if form == "unread":
            patience = min(patience, _UNREAD_PATIENCE)
        taken: list[float] = []
        for way in ways:
            try:
                taken.append(self._leave(form, way, patience))
            except TimeoutError:
                return Seen(GOES_ON)
        return Seen(STOPS, tuple(taken))

    def _takes_all(self) -> bool:
        """Whether it takes a long answer into memory, with a client who reads none."""
        with self._ask("long"):
            size = -1
            while not self._notes("ended"):
                # It writes a note for each part: no more of them, no more taken.
                if size == (size := self._log.stat().st_size):
                    return False
                time.sleep(0.5)
        return True

    def _leave(self, form: str, way: str, patience: float) -> float:
        with self._ask(form) as peer:
            if form in ("handler", "unread"):
                self._wait("works", _PATIENCE)
            else:
                peer.recv(1000)
            left = time.monotonic()
            if way == "half-close":
                peer.shutdown(socket.SHUT_WR)
                _read_out(peer, patience)
            elif way == "reset":
                linger = struct.pack("ii", 1, 0)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        ended = self._wait("ended", patience)
        assert ended["gone"], (form, way)
        return float(ended["at"] - left)

    def _ask(self, form: str) -> socket.socket:
        self._asked += 1
        peer = socket.create_connection(("127.0.0.1", self.port), 5)
        body = _UNREAD_BODY if form == "unread" else _BODY
        head = _HEAD.format(f"{form}?{self._asked}", len(body)).encode()
        if form == "unread":
            _send_most(peer, head + body)
        else:
            peer.sendall(head + body)
        return peer

    def _wait(self, what: str, patience: float) -> dict[str, Any]:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for note in self._notes(what):
                return note
            time.sleep(0.001)
        raise TimeoutError(what)

    def _notes(self, what: str) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines(keepends=True)
        notes = [json.loads(line) for line in lines if line.endswith("\n")]
        mine = [note for note in notes if note["of"] == str(self._asked)]
        return [note for note in mine if note["what"] == what]


def _send_most(peer: socket.socket, data: bytes) -> None:
    """Send what the peer's kernel takes, until nothing has moved for half a second."""
    peer.setblocking(False)
    sent, moved, before = 0, time.monotonic(), -1
    while time.monotonic() - moved < 0.5:
        with contextlib.suppress(BlockingIOError):
            sent += peer.send(data[sent : sent + 262144])
        here = fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(4))  # not acknowledged yet
        arrived = sent - int.from_bytes(here, sys.byteorder)
        if arrived == len(data):
            break
        if arrived != before:
            moved, before = time.monotonic(), arrived
        time.sleep(0.001)
    peer.setblocking(True)


def _read_out(peer: socket.socket, patience: float) -> None:
    peer.settimeout(patience)
    with contextlib.suppress(OSError):
        while peer.recv(65536):
            pass


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


def measure(kind: Kind, stack: str, repeat: int = 1) -> dict[str, Seen]:
    """Return what becomes of each form of work on one server with one stack."""
    bare = stack == "bare"
    ways, patience = LEAVES * repeat, _PATIENCE
    if bare:
        ways, patience = LEAVES[:1], _BARE_PATIENCE
    with running(kind, stack) as server:
        return {form: server.verdict(form, ways, patience) for form in FORMS}


def table(repeat: int) -> str:
    """Return the table as Markdown, with the versions that it is about."""
    columns = ["server", "work", *STACKS.values(), "time to stop"]
    lines = [_row(columns), _row(["---"] * (len(columns) - 1) + ["---:"])]
    versions = {"Python": platform.python_version()}
    for kind in filter(lambda each: each.installed, KINDS):
        package = kind.package if kind.package != "httptools" else "uvicorn"
        versions[package] = metadata.version(package)
        print(kind.name, file=sys.stderr)
        seen = {stack: measure(kind, stack, repeat) for stack in STACKS}
        for form, words in FORMS.items():
            verdicts = [seen[stack][form].verdict for stack in STACKS]
            alone = seen["plain"][form].taken_s
            most = max(
                (s for it in STACKS if it != "bare" for s in seen[it][form].taken_s),
                default=0.0,
            )
            lines.append(_row([kind.name, words, *verdicts, _times(alone, most)]))
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, "", f"Measured with {found}.", ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _times(alone_s: Sequence[float], most_s: float) -> str:
    if not alone_s:
        return ""
    middle = statistics.median(alone_s)
    return f"{1000 * middle:.1f} ms, at most {1000 * most_s:.1f}"


def documented(page: Path) -> dict[tuple[str, str, str], str]:
    """Return what the table of *page* says of each server, form and stack."""
    rows = page.read_text().split(MARKS[0])[1].split(MARKS[1])[0].splitlines()
    forms = {words: form for form, words in FORMS.items()}
    said = {}
    for row in filter(lambda line: line.startswith("| "), rows[2:]):
        name, words, *verdicts, _ = (cell.strip() for cell in row.split("|")[1:-1])
        for stack, verdict in zip(STACKS, verdicts, strict=True):
            said[name, forms[words], stack] = verdict
    return said


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
