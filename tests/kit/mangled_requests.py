"""Requests of HTTP/1.1 with odd framing: valid ones, each changed in a few places.

Each change leaves a request whose body is the one that was meant, or which has to be
refused. So a server that passes it on with another body, or takes a part of its body
for a request, has read it wrongly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

# What is only ever sent inside bodies, trailers and values; never a request.
INSIDE = b"SMUGGLED"
INNER = b"GET /%b HTTP/1.1\r\nhost: a\r\nx-marker: %b\r\n\r\n" % (INSIDE, INSIDE)
METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH")
JSON = b"content-type: application/json"


@dataclass(slots=True)
class Request:
    """One request, in parts that can be changed.

    Attributes:
        marker: Names it, in its target and a header.
        lines: Of its head, but for the first.
        framing: The line among them that frames its body; empty if none does.
        body: As it was meant.
        chunks: How the body is cut; empty where it has a length.
        wire: The body as it is sent.
        illegal: Why no server may pass it on; empty if it might.
        changes: Names of what was changed.
    """

    marker: bytes
    method: bytes = b"GET"
    target: bytes = b""
    version: bytes = b"HTTP/1.1"
    gaps: tuple[bytes, bytes] = (b" ", b" ")
    before: bytes = b""
    eol: bytes = b"\r\n"
    lines: list[bytes] = field(default_factory=list)
    framing: bytes = b""
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    wire: bytes = b""
    illegal: str = ""
    changes: list[str] = field(default_factory=list)

    def head(self) -> bytes:
        """Return the head as it is sent."""
        first = self.gaps[0].join((self.method, self.target))
        first += self.gaps[1] + self.version
        return self.before + self.eol.join((first, *self.lines, b"", b""))

    def put(self, draw: random.Random, *lines: bytes) -> None:
        """Add lines at random places."""
        for line in lines:
            self.lines.insert(draw.randrange(len(self.lines) + 1), line)

    def reframe(self, draw: random.Random, line: bytes) -> None:
        """Replace the line that frames the body, or add one."""
        if self.framing in self.lines:
            self.lines[self.lines.index(self.framing)] = line
        else:
            self.put(draw, line)


def plain(draw: random.Random, marker: bytes) -> Request:
    """Return a valid request: without a body, with a length, or in chunks."""
    request = Request(marker, target=b"/r" + marker)
    request.lines = [b"host: a", b"x-marker: " + marker, b"accept: */*"]
    if draw.random() < 0.2:  # its body is read as a whole before it passes
        request.target = b"/v1/chat/completions?r=/r" + marker
        request.lines.append(JSON)
    if draw.random() < 0.2:
        request.method = draw.choice(METHODS)
        return request
    request.method = draw.choice((b"POST", b"POST", b"PUT", b"PATCH", b"GET"))
    request.body = b"z" * draw.choice((0, 1, 3, 9, 10, 16, 300)) + INNER
    if draw.random() < 0.5:
        request.wire = request.body
        request.framing = b"content-length: %d" % len(request.body)
    else:
        at = draw.randrange(len(request.body) + 1)
        pieces = (request.body[:at], request.body[at:])
        request.chunks = [piece for piece in pieces if piece]
        request.wire = chunked(request.chunks)
        request.framing = b"transfer-encoding: chunked"
    request.put(draw, request.framing)
    return request


def chunked(
    pieces: list[bytes],
    size: Callable[[int], bytes] = lambda n: b"%x" % n,
    last: bytes = b"0",
    trailers: bytes = b"",
) -> bytes:
    """Return *pieces* as chunks, with these size lines and trailers."""
    found = b"".join(b"%b\r\n%b\r\n" % (size(len(it)), it) for it in pieces)
    return found + last + b"\r\n" + trailers + b"\r\n"


# Of the length n: what no server may take for it, and other ways to write it.
BAD_LENGTHS = (
    *(b"+%d", b"-%d", b"0x%x", b"%d.0", b"%de0", b"%d;", b"%d,", b",%d", b"%d 0"),
    *(b"%d, 0", b"%d 1", b"%d_0", b"%d\x00", b"\x00%d", b"%d\x0b", b"\x0c%d"),
    *(b"%d\xa0", b"%da", b'"%d"', b"%d\r", b"\r%d", b"99999999999999999999%d"),
    *(b"18446744073709551616%d", b"\xd9\xa1%d", b"(%d)", b"%d\x85", b"- %d"),
)
LENGTHS = (b"00%d", b" %d", b"%d ", b"\t%d\t", b"%d, %d", b"%d,%d", b"0" * 30 + b"%d")
BAD_CODINGS = (
    *(b"xchunked", b"chunkedx", b"chunked, identity", b"identity", b"gzip"),
    *(b"chunked, gzip", b"chun ked", b"chunk\x00ed", b"\x0bchunked", b"chunked\x0b"),
    *(b"chunked\x00", b'"chunked"', b"chunked;q=1", b"x chunked", b"chunked x"),
    *(b"chunked\xa0", b"\x85chunked", b"chunked\r", b"\rchunked", b"chunked\x1f"),
)
CODINGS = (
    *(b"Chunked", b"CHUNKED", b"\tchunked", b"chunked\t", b"  chunked  ", b"chunked,"),
    *(b",chunked", b"gzip, chunked", b"identity, chunked", b"chunked, chunked", b""),
)


def spelt(form: bytes, number: int) -> bytes:
    """Return *number* in a form that has places for it."""
    return form % ((number,) * form.count(b"%"))


def length(draw: random.Random, it: Request) -> None:
    """Spell the length oddly; beside chunks, add one."""
    bad = draw.random() < 0.7
    value = spelt(draw.choice(BAD_LENGTHS if bad else LENGTHS), len(it.body))
    name = draw.choice((b"content-length: ", b"Content-Length:", b"CONTENT-LENGTH: "))
    if it.chunks or not it.framing:
        it.put(draw, name + value)
        if it.chunks:
            it.illegal = "both framings"
    else:
        it.reframe(draw, name + value)
    if bad:
        it.illegal = "a bad length"


def lengths(draw: random.Random, it: Request) -> None:
    """Add another length, an equal one or not."""
    if it.framing:
        other = draw.choice((len(it.body), len(it.body), 0, len(it.body) + 1, 7))
        it.put(draw, b"content-length: %d" % other)
        if it.chunks or other != len(it.body):
            it.illegal = "several lengths"


def coding(draw: random.Random, it: Request) -> None:
    """Spell the coding oddly; beside a length, add one."""
    bad = draw.random() < 0.7
    value = draw.choice(BAD_CODINGS if bad else CODINGS)
    name = draw.choice((b"transfer-encoding: ", b"Transfer-Encoding:"))
    if it.chunks:
        it.reframe(draw, name + value)
        if not value:
            it.illegal = "no coding"
    else:
        it.put(draw, name + value)
        if value and it.framing:
            it.illegal = "both framings"
    if bad:
        it.illegal = "a bad coding"


def codings(draw: random.Random, it: Request) -> None:
    """Add another coding."""
    value = draw.choice((b"identity", b"chunked", b"gzip", b"xchunked", b"\x0bchunked"))
    it.put(draw, b"Transfer-Encoding: " + value)
    it.illegal = "several codings" if it.framing else "a coding without chunks"


def gap(draw: random.Random, it: Request) -> None:
    """Put something before a colon."""
    at = draw.randrange(len(it.lines))
    name, colon, value = it.lines[at].partition(b":")
    what = draw.choice((b" ", b"\t", b"\x0b", b"\x00", b"\r", b"\xa0", b" \t", b"\x1f"))
    it.lines[at] = name + what + colon + value
    if colon:
        it.illegal = "a gap before a colon"


NAMES = (
    *(
        b"x(y): 1",
        b"x y: 1",
        b": 1",
        b"x\x00y: 1",
        b"x\x80: 1",
        b'"x": 1',
        b"x",
        b"@:1",
    ),
    *(b"x\x7f: 1", b"x[]: 1", b"content-length\x00: 0", b"content-length\x0b: 0"),
    *(b"transfer-encoding\x00: chunked", b"\x00transfer-encoding: chunked"),
    *(b"\xc3\xa4: 1", b"content-length", b"x/y: 1", b"x=y", b"{x}: 1", b"x;y: 1"),
)
ODD_NAMES = (
    *(b"content_length: 0", b"transfer_encoding: chunked", b"x.y: 1", b"!#$%&'*: 1"),
    *(b"content-length-: 0", b"-content-length: 0", b"transfer-encoding2: chunked"),
    *(b"|: 1", b"^_`: 1", b"content\xadlength: 0", b"x" * 3000 + b": 1"),
)


def name(draw: random.Random, it: Request) -> None:
    """Add a header with an odd name."""
    if draw.random() < 0.6:
        it.put(draw, draw.choice(NAMES))
        it.illegal = "a bad name"
    else:
        it.put(draw, draw.choice(ODD_NAMES))


def value(draw: random.Random, it: Request) -> None:
    """Add a header with an odd value."""
    ends = (b"\n", b"\r", b"\r\r", b"\n\r", b"\x00", b"\x0b", b"\x85", b"\xe2\x80\xa8")
    inner = (b"transfer-encoding: chunked", b"content-length: 0", b"x: y", INNER[:22])
    odd = (
        b"x-a: b" + draw.choice(ends) + draw.choice(inner),
        b"x-a:" + bytes((draw.randrange(256),)).replace(b"\n", b"") + b"b",
        b"x-a: " + b"v" * draw.choice((0, 1000, 9000)),
        b"x-a:\t \t",
        b"x-a: \xff\xfe\x80",
    )
    it.put(draw, draw.choice(odd))


def fold(draw: random.Random, it: Request) -> None:
    """Fold a line, or make one look like the fold of the one before it."""
    at = draw.randrange(len(it.lines))
    blank = draw.choice((b" ", b"\t", b"  "))
    if draw.random() < 0.5:
        it.lines[at] += b"\r\n" + blank + draw.choice((b"0", b"x: y", b"chunked", b""))
    else:
        it.lines[at] = blank + it.lines[at]


def end(draw: random.Random, it: Request) -> None:
    """End lines otherwise than by CR LF."""
    if draw.random() < 0.4:
        it.eol = draw.choice((b"\n", b"\r", b"\r\r\n"))
    else:
        at = draw.randrange(len(it.lines) - 1)
        what = draw.choice((b"\n", b"\r", b"\r\r\n", b"\x00\r\n", b"\r\n\x00"))
        it.lines[at : at + 2] = [what.join(it.lines[at : at + 2])]


def target(draw: random.Random, it: Request) -> None:
    """Send another form of target."""
    path = it.target
    forms = (
        *(b"http://a" + path, b"http://b" + path, b"HTTP://a" + path, b"https://a:1"),
        *(b"a:80", b"*", b"http://a", path + b"#f", path + b"#/%b" % INSIDE, b"//b"),
        *(b"//b" + path, path[1:], path + b"?a b", path + b"\x00", path + b"\xc3\xa4"),
        *(path + b"\t", b"\\" + path, path + b"%0d%0aGET%20/", path + b"%00", b"/"),
        *(
            path + b"\rx",
            path + b"\nx",
            path + b"?",
            path + b"??#?",
            b"http://u@a" + path,
        ),
        *(path + b'"<>', path + b"\x7f", path + b"\x0b", path + b"[]|{}^`", b"", b"?"),
        *(
            path + b";a=b",
            b"/%2e%2e" + path,
            b"/../" + path,
            path + b"%",
            path + b"%zz",
        ),
        *(path + b" HTTP/1.1\rx:", b"http:" + path, b"://a" + path, b"/" + b"p" * 9000),
    )
    it.target = draw.choice(forms)


def version(draw: random.Random, it: Request) -> None:
    """Name another version."""
    good = (b"HTTP/1.0", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/0.9", b"HTTP/2.0")
    bad = (
        *(
            b"http/1.1",
            b"HTTP/1.1x",
            b"HTTP/11",
            b"HTTP/1",
            b"HTTP/1.",
            b"",
            b"ICE/1.0",
        ),
        *(
            b"HTTP/01.1",
            b"HTTP/1.10",
            b"HTTP/1.1 ",
            b"HTTP/1,1",
            b"RTSP/1.0",
            b"HTTP/+1",
        ),
        *(b"HTTP/1.1\t", b"HTTP/1.1\x00", b"HTTP /1.1", b"SIP/2.0", b"HTTP/3.0"),
    )
    it.version = draw.choice((*good, *good, *bad))
    if it.version != b"HTTP/1.1" and it.chunks:
        it.illegal = "chunks of another version"


def first(draw: random.Random, it: Request) -> None:
    """Change the method, or what is between the parts of the first line."""
    odd = (
        *(b"get", b"G@T", b"GET\x00", b"", b"PRI", b"CONNECT", b"TRACE", b"HEAD", b"X"),
        *(
            b"M-SEARCH",
            b"SOURCE",
            b"PURGE",
            b"QUERY",
            b"(",
            b"POST:",
            b"REPORT",  # none of RTSP's, which llhttp reads, but not in HTTP
            b"LOCK",
        ),
    )
    if draw.random() < 0.5:
        it.method = draw.choice(odd)
        return
    blank = draw.choice((b"  ", b"\t", b"", b"\x0b", b"\r", b" \r", b"\x00", b"\xa0"))
    it.gaps = (blank, b" ") if draw.random() < 0.5 else (b" ", blank)


def before(draw: random.Random, it: Request) -> None:
    """Put something before the first line."""
    odd = (
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\x00",
        b"\t",
        b"\xef\xbb\xbf",
        b"0",
    )
    it.before = draw.choice(odd)


BAD_SIZES = (
    *(b"0x%x", b"+%x", b"-%x", b" %x", b"%xg", b"%x 0", b"\x00%x", b"%x\x00", b"%x\n"),
    *(b"1" + b"0" * 16 + b"%x", b"f" * 16 + b"%x", b"%x\r", b"%x,", b'"%x"', b"\t%x"),
    *(b"%x.0", b"%x\x0b", b"", b";a", b"0_%x", b"%x;a\nb", b"%x;a\rb", b"%x\xa0"),
    *(b"%x;\x00", b"%x;a=\x00", b"%x\r\n", b"%x;\n", b"1" + b"0" * 32 + b"%x"),
)
SIZES = (b"%X", b"0%x", b"0000%X", b"%x;a=b", b'%x;a="b c"', b"%x;a", b"%x ;a", b"%x ")


def chunks(draw: random.Random, it: Request) -> None:
    """Spell a size, or the end of a chunk, oddly."""
    if not it.chunks or it.wire != chunked(it.chunks):
        return
    how = draw.random()
    if how < 0.4:
        form = draw.choice(BAD_SIZES)
        it.wire = chunked(it.chunks, lambda n: spelt(form, n))
        it.illegal = f"a bad size {form!r}"
    elif how < 0.6:
        form = draw.choice(SIZES)
        it.wire = chunked(it.chunks, lambda n: spelt(form, n))
    elif how < 0.8:
        last = draw.choice(
            (b"00", b"000", b"0;a", b"0x0", b"-0", b"+0", b"0 ", b"", b"0\n")
        )
        it.wire = chunked(it.chunks, last=last)
    else:
        piece = it.chunks[-1]
        ends = (b"", b"\n", b"\r", b"x\r\n", b"\r\n\r\n", b"\n\r", b"\r\r\n", b"  \r\n")
        end = draw.choice(ends)
        it.wire = b"".join((b"%x\r\n" % len(piece), piece, end, b"0\r\n\r\n"))
        it.wire = chunked(it.chunks[:-1])[: -len(b"0\r\n\r\n")] + it.wire
        it.illegal = "a bad end of a chunk"


TRAILERS = (
    *(b"x-marker: SMUGGLED", b"content-length: 3", b"transfer-encoding: identity"),
    *(
        b"host: SMUGGLED",
        INNER[:-4],
        b"x y: SMUGGLED",
        b" x: y",
        b"x: y\n",
        b"x\x00: y",
    ),
    *(
        b"x: SMUGGLED\r\n y",
        b"connection: close",
        b"upgrade: h2c",
        b"expect: 100-continue",
    ),
)


def trailers(draw: random.Random, it: Request) -> None:
    """Send trailers."""
    if it.chunks and it.wire == chunked(it.chunks):
        found = draw.choices(TRAILERS, k=draw.randrange(1, 3))
        it.wire = chunked(
            it.chunks, trailers=b"".join(each + b"\r\n" for each in found)
        )


def expect(draw: random.Random, it: Request) -> None:
    """Expect something."""
    values = (b"100-continue", b"100-Continue", b"200-ok", b"", b"100-continue, x")
    it.put(
        draw, *(b"expect: " + draw.choice(values) for _ in range(draw.choice((1, 2))))
    )


HANDSHAKE = (
    b"sec-websocket-version: 13",
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


def upgrade(draw: random.Random, it: Request) -> None:
    """Ask for another protocol."""
    what = draw.choice(
        (b"h2c", b"websocket", b"WebSocket", b"TLS/1.0", b"h2c, websocket")
    )
    how = draw.choice(
        (b"upgrade", b"Upgrade, keep-alive", b"keep-alive", b"upgrade, te")
    )
    name = draw.choice((b"connection: ", b"Connection:", b"proxy-connection: "))
    it.put(draw, b"upgrade: " + what, name + how)
    if draw.random() < 0.5:
        it.put(draw, *HANDSHAKE)


def websocket(draw: random.Random, it: Request) -> None:
    """Ask for a WebSocket."""
    it.method = b"GET"
    it.put(draw, b"upgrade: websocket", b"connection: upgrade", *HANDSHAKE)


def host(draw: random.Random, it: Request) -> None:
    """Send no ``Host``, another, or two."""
    odd = (
        *(b"host: a", b"host: b", b"host: a b", b"host: a/b", b"host: u@a", b"host:"),
        *(
            b"host: a:99999999",
            b"host: a, b",
            b"host: [::1",
            b"host: a\x00",
            b"Host: a#b",
        ),
    )
    if draw.random() < 0.5:
        it.lines = [each for each in it.lines if each != b"host: a"]
    if draw.random() < 0.8:
        it.put(draw, draw.choice(odd))


def connection(draw: random.Random, it: Request) -> None:
    """Name headers as those of this connection."""
    names = (
        *(b"content-length", b"transfer-encoding", b"host", b"accept", b"close", b"te"),
        *(b"keep-alive", b"x-forwarded-for", b"Content-Length ", b"", b"@", b"upgrade"),
    )
    it.put(
        draw, b"connection: " + b",".join(draw.choices(names, k=draw.randrange(1, 4)))
    )


CHANGES: tuple[Callable[[random.Random, Request], None], ...] = (
    *(length, lengths, coding, codings, gap, name, value, fold, end, target, version),
    *(first, before, chunks, trailers, expect, upgrade, websocket, host, connection),
)


@dataclass(slots=True)
class Case:
    """What one client sends, in one piece or several."""

    number: int
    requests: list[Request]
    pieces: list[bytes]


def make_case(draw: random.Random, number: int) -> Case:
    """Return some requests behind one another, most of them changed."""
    requests = []
    for place in range(draw.choice((1, 1, 2, 2, 3))):
        request = plain(draw, b"%d.%d" % (number, place))
        for change in draw.sample(CHANGES, draw.choice((0, 1, 1, 1, 2, 2, 3))):
            change(draw, request)
            request.changes.append(change.__name__)
        requests.append(request)
    if draw.random() < 0.3:
        after = Request(b"%d.%d" % (number, len(requests)))
        after.target, after.lines = b"/r" + after.marker, [b"host: a"]
        requests.append(after)
    parts = [part for each in requests for part in (each.head(), each.wire)]
    data = b"".join(parts)
    pieces = [data]
    how = draw.random()
    if how < 0.1:
        at = draw.randrange(len(data) + 1)
        pieces = [data[:at], data[at:]]
    elif how < 0.2:  # where a body or the next head begins
        at = draw.randrange(1, len(parts))
        pieces = [b"".join(parts[:at]), b"".join(parts[at:])]
    return Case(number, requests, [each for each in pieces if each])
