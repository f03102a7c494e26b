"""Requests of odd framing through the proxy; run as a script for as many as you like.

    python tests/lifecycle_tools/framing.py [--count 100000] [--seed 1]

The upstream reads each byte that the proxy sends it with two parsers. It must find what
the client meant, the same with both, or nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import httptools

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

from mangled_requests import INSIDE, Case, make_case
from proxy_kit import ProxyProcess, running_proxy

FLOWS = 24
# Nothing has come for so long: the proxy waits for the rest of a request.
QUIET_SECONDS = 0.4
# For a connection, and for all that one case may take.
PATIENCE = 60.0
# Cases whose requests may still arrive.
REMEMBERED = 5_000
MOST_WRONG = 20
MARKER = re.compile(rb"/r(\d+)\.(\d+)")
# A head as a proxy should write it: no space before a colon, no fold, no controls.
HEAD = re.compile(
    rb"[A-Z-]+ [\x21-\x7e]+ HTTP/1\.1\r\n"
    rb"(?:[\w!#$%&'*+.^`|~-]+: ?(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*"
    rb"[\x21-\x7e\x80-\xff])?)?\r\n)*\r\n"
)
ANSWER = b"HTTP/1.1 200 OK\r\nx-counter: %d\r\ncontent-length: 0\r\n\r\n"
SETTINGS = {"LIFECYCLE_BODY_TIMEOUT": "0.4", "LIFECYCLE_MAX_BODY": "65536"}
VALID = b"GET /valid HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


@dataclass(slots=True)
class Seen:
    """One request, as a parser reads it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


class Tools:
    """Requests as httptools reads them, which is llhttp."""

    def __init__(self) -> None:
        self.found: list[Seen] = []
        self.begun = 0
        self._now = Seen(b"", b"")
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Read bytes; raises ``ValueError`` if they are no request."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if error.args[0] != len(data):
                raise ValueError("bytes behind an upgrade") from None
        except httptools.HttpParserError as error:
            raise ValueError(f"httptools: {error!r}") from None

    def on_message_begin(self) -> None:
        """Called when a request begins."""
        self.begun += 1
        self._now = Seen(b"", b"")

    def on_url(self, url: bytes) -> None:
        """Called with a part of the target."""
        self._now.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for each header, and each trailer."""
        self._now.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        """Called with a part of the body."""
        self._now.body += body

    def on_message_complete(self) -> None:
        """Called when a request is complete."""
        self._now.method = self._parser.get_method()
        self.found.append(self._now)


class Strict:
    """One request as h11 reads it."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=2**17)
        self._now: Seen | None = None
        self.found: list[Seen] = []

    def feed(self, data: bytes) -> None:
        """Read bytes; raises ``ValueError`` if they are no single request."""
        if self.found:
            raise ValueError("bytes behind a request")
        self._http.receive_data(data)
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise ValueError(f"h11: {error}") from None
            if isinstance(event, h11.Request):
                headers = [(bytes(name), bytes(value)) for name, value in event.headers]
                self._now = Seen(bytes(event.method), bytes(event.target), headers)
            elif isinstance(event, h11.Data):
                assert self._now
                self._now.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert self._now
                self._now.headers += list(event.headers)
                self.found.append(self._now)
            else:
                break
        if self.found and self._http.trailing_data[0]:
            raise ValueError("bytes behind a request")


@dataclass
class Result:
    """What a run saw.

    Attributes:
        cases: Clients' turns, of one to four requests each.
        requests: That were sent.
        reached: That the upstream was sent.
        answered: That clients have the upstream's response to.
        refused: That the proxy answered itself.
        closed: Cases that ended with the connection.
        quiet: Cases in which the proxy waited for more.
        statuses: Of the proxy's own answers.
        wrong: What should not be.
    """

    cases: int = 0
    requests: int = 0
    reached: int = 0
    answered: int = 0
    refused: int = 0
    closed: int = 0
    quiet: int = 0
    seconds: float = 0.0
    statuses: Counter[bytes] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.cases} cases, {self.requests} requests, {self.reached} reached the "
            f"upstream, {self.refused} refused, {self.closed} cases closed, "
            f"{self.quiet} left waiting, {self.seconds:.0f} s, "
            f"{self.cases / max(self.seconds, 0.001):.0f} cases/s, "
            f"{len(self.wrong)} wrong"
        )


class Run:
    """What clients have sent, and what has reached the upstream."""

    def __init__(self, seed: int, count: int) -> None:
        self.result = Result()
        self.markers: list[bytes] = []  # by the number in the upstream's response
        self.reached: dict[bytes, int] = {}
        self.open: set[Any] = set()  # connections to the upstream
        self._cases: dict[int, Case] = {}
        self._draw = random.Random(seed)
        self._left = count
        self._next = 0

    def draw(self) -> Case | None:
        """Return the next case; ``None`` when all are done."""
        if self._next >= self._left or len(self.result.wrong) >= MOST_WRONG:
            return None
        case = make_case(self._draw, self._next)
        self._cases[self._next] = case
        if old := self._cases.pop(self._next - REMEMBERED, None):
            for each in old.requests:
                self.reached.pop(each.marker, None)
        self._next += 1
        self.result.cases += 1
        self.result.requests += len(case.requests)
        return case

    def fail(self, what: str, marker: bytes = b"", sent: bytes = b"") -> None:
        """Note what should not be."""
        case = self._cases.get(int(marker.partition(b".")[0] or -1))
        changes = (
            [(it.marker.decode(), it.changes) for it in case.requests] if case else ""
        )
        pieces = case.pieces if case else ""
        text = f"{what}\n  {changes}\n  client: {pieces}\n  upstream: {sent!r}"
        self.result.wrong.append(text)

    def take(self, raw: bytes, one: Seen, other: Seen) -> int:
        """Judge a request that has reached the upstream; return its number."""
        marks = MARKER.search(one.target)
        named = [value for name, value in one.headers if name == b"x-marker"]
        marker = b"%b.%b" % marks.groups() if marks else b"".join(named)
        self.result.reached += 1
        self.markers.append(marker)
        if problem := self._problem(raw, one, other, marker):
            is_case = re.fullmatch(rb"\d+\.\d+", marker)
            self.fail(problem, marker if is_case else b"", raw)
        return len(self.markers) - 1

    def _problem(self, raw: bytes, one: Seen, other: Seen, marker: bytes) -> str | None:
        head, _, _ = raw.partition(b"\r\n\r\n")
        names = [name for name, _ in one.headers]
        framing = names.count(b"content-length") + names.count(b"transfer-encoding")
        inside = [
            name for name, value in one.headers if name != b"x-a" and INSIDE in value
        ]
        if one != other:
            return f"two readings: {one} and {other}"
        if not HEAD.fullmatch(head + b"\r\n\r\n"):
            return "a head that one may read in several ways"
        if framing > 1 or names.count(b"host") != 1:
            return "several framings, or not one host"
        if INSIDE in one.target or inside:
            return "a request, or a header, out of a body"
        if one.target == b"/valid":
            return None
        number, _, place = marker.partition(b".")
        case = self._cases.get(int(number)) if number.isdigit() else None
        if case is None or not place.isdigit():
            return "a request that nobody sent"
        self.reached[marker] = self.reached.get(marker, 0) + 1
        meant = case.requests[int(place)]
        if self.reached[marker] > 1:
            return "a request twice"
        if one.method != meant.method:
            return "another method"
        if one.body != meant.body:
            return "another body than was meant"
        return f"passed on in spite of {meant.illegal}" if meant.illegal else None


class Upstream(asyncio.Protocol):
    """One connection to the upstream."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begin()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when it is closed."""
        self._run.open.discard(self._transport)

    def _begin(self) -> None:
        self._raw = bytearray()
        self._strict, self._tools = Strict(), Tools()

    def connection_made(self, transport: Any) -> None:
        """Called when it is open."""
        self._transport = transport
        self._run.open.add(transport)

    def data_received(self, data: bytes) -> None:
        """Called with what the proxy has sent."""
        self._raw += data
        raw = bytes(self._raw)
        try:
            self._strict.feed(data)
            self._tools.feed(data)
            if len(self._strict.found) != len(self._tools.found):
                raise ValueError("one parser is at the end, and one is not")
            if self._tools.begun > 1:
                raise ValueError("bytes behind a request")
        except ValueError as error:
            marks = MARKER.search(raw)
            marker = b"%b.%b" % marks.groups() if marks else b""
            self._run.fail(str(error), marker, raw)
            self._transport.abort()
            return
        if self._strict.found:
            number = self._run.take(raw, self._strict.found[0], self._tools.found[0])
            self._begin()
            self._transport.write(ANSWER % number)


class Client(asyncio.Protocol):
    """One connection to the proxy."""

    def __init__(self) -> None:
        self._data = b""
        self._heard = asyncio.Event()
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        """Called when it is open."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Called with what the proxy has sent."""
        self._data += data
        self._heard.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when it is closed."""
        self.closed = True
        self._heard.set()

    def answer(self, *, has_body: bool) -> tuple[bytes, int | None] | None:
        """Return the next status and the upstream's number, if it is complete."""
        while True:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return None
            if not head.startswith(b"HTTP/1.1 1"):
                break
            self._data = rest
        values = {}
        for line in head.lower().split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            values[name] = value.strip()
        size = int(values.get(b"content-length", 0)) if has_body else 0
        if len(rest) < size:
            return None
        self._data = rest[size:]
        number = values.get(b"x-counter")
        return head[9:12], None if number is None else int(number)

    async def wait(self, seconds: float) -> bool:
        """Wait for more; whether there is."""
        try:
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        except TimeoutError:
            return False
        self._heard.clear()
        return True


async def connect(port: int) -> Client:
    """Return a new connection to the proxy."""
    async with asyncio.timeout(PATIENCE):
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        return client


async def play(run: Run, client: Client, case: Case) -> bool:
    """Send one case and judge the answers; whether the connection is still good."""
    for place, piece in enumerate(case.pieces):
        if place:
            await asyncio.sleep(0.003)  # so that the proxy reads one without the other
        client.transport.write(piece)
    answers: list[int | None] = []
    until = time.monotonic() + PATIENCE
    while len(answers) < len(case.requests):
        meant = case.requests[len(answers)]
        found = client.answer(has_body=meant.method != b"HEAD")
        if found is not None:
            status, number = found
            answers.append(number)
            if number is None:
                run.result.statuses[status] += 1
            continue
        if client.closed:
            break
        if not await client.wait(QUIET_SECONDS) or time.monotonic() > until:
            break
    judge(run, client, case, answers)
    return (
        not client.closed and len(answers) == len(case.requests) and None not in answers
    )


def judge(run: Run, client: Client, case: Case, answers: list[int | None]) -> None:
    """Note answers to other requests, and requests without an answer."""
    result = run.result
    theirs = [number for number in answers if number is not None]
    result.answered += len(theirs)
    result.refused += len(answers) - len(theirs)
    for request, number in zip(case.requests, answers, strict=False):
        if number is not None and run.markers[number] != request.marker:
            other = run.markers[number].decode()
            run.fail(f"the response to {other}", request.marker)
    ended = len(answers) == len(case.requests)
    reached = sum(run.reached.get(each.marker, 0) for each in case.requests)
    if ended and not client.closed and reached > len(theirs):
        run.fail("more requests than responses", case.requests[0].marker)
    if not ended and client.closed:
        result.closed += 1
    elif not ended:
        result.quiet += 1


async def flow(run: Run, port: int) -> None:
    """Send cases, one after another, as one client."""
    client: Client | None = None
    while case := run.draw():
        if client is None or client.closed:
            client = await connect(port)
        if not await play(run, client, case):
            client.transport.abort()
            client = None
    if client:
        client.transport.abort()


async def lives(run: Run, port: int) -> None:
    """Note it if a valid request has no answer."""
    client = await connect(port)
    client.transport.write(VALID)
    found = None
    while found is None and (not client.closed and await client.wait(PATIENCE)):
        found = client.answer(has_body=True)
    client.transport.abort()
    if found is None or found[0] != b"200":
        run.fail(f"a valid request is answered with {found}")


@contextlib.asynccontextmanager
async def upstream_of(run: Run) -> AsyncIterator[str]:
    """Serve what the proxy sends; yield the URL."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(run), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for each in list(run.open):
            each.abort()
        await asyncio.sleep(0)


async def storm(run: Run, port: int, flows: int = FLOWS) -> Result:
    """Send all cases to the proxy at *port*."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(flows):
            tasks.create_task(flow(run, port))
    await lives(run, port)
    run.result.seconds = time.monotonic() - began
    return run.result


async def fuzz(*, seed: int, count: int) -> Result:
    """Send cases to the command, in a process of its own."""
    run = Run(seed, count)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            upstream_of(run) as url,
            running_proxy(url, Path(folder), **SETTINGS) as proxy,
        ):
            result = await storm(run, proxy.port)
            check_log(run, proxy)
    return result


def check_log(run: Run, proxy: ProxyProcess) -> None:
    """Note an error that nobody expected."""
    before, found, trace = proxy.log().partition("Traceback")
    if found or proxy.process.returncode is not None:
        run.fail(f"the proxy's log: {before[-300:]}{trace[:4000]}")


def main() -> int:
    """Run the command line; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result = asyncio.run(fuzz(seed=options.seed, count=options.count))
    for each in result.wrong:
        print(each)
    print(f"seed {options.seed}: {result}")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
