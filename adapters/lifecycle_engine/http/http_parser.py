"""httptools' parser, without the offers to speak another protocol."""

from __future__ import annotations

from typing import Protocol

import httptools

Headers = list[tuple[bytes, bytes]]
_OFFER = (b"upgrade", b"http2-settings")


class Request(Protocol):
    """What the parser's owner has read of a request."""

    url: bytes
    headers: Headers


class Parser:
    """Reads requests that offer an upgrade as those that do not.

    httptools stops behind the head of one and takes its body for the other protocol.
    Nobody has to take the offer, so that head is read again without it. ``curl
    --http2`` and some Java clients offer HTTP/2 with their first request.

    While `should_upgrade` is true, the owner is to ignore that a head, or a
    message, is complete: both come again.

    Args:
        owner: Has httptools' callbacks, and keeps what they were called with.
    """

    __slots__ = ("_owner", "_parser")

    def __init__(self, owner: Request) -> None:
        self._owner = owner
        self._parser = _fresh(owner)

    def feed_data(self, data: bytes) -> None:
        """Parse *data*, calling the owner.

        Raises:
            httptools.HttpParserError: It is not HTTP, or a CONNECT.
        """
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
            else:
                return
            self._again()

    def _again(self) -> None:
        head = _head(self._parser, self._owner)
        self._parser = _fresh(self._owner)
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            raise httptools.HttpParserError("CONNECT is for proxies") from None

    def should_upgrade(self) -> bool:
        """Whether the head that is being read offers an upgrade."""
        return bool(self._parser.should_upgrade())

    def should_keep_alive(self) -> bool:
        """Whether the connection may take another request."""
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        """Such as "1.1"."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Such as ``b"POST"``."""
        return bytes(self._parser.get_method())


def _fresh(owner: Request) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(owner)
    # As uvicorn does: what comes behind a last request is dropped, not refused.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _head(parser: httptools.HttpRequestParser, request: Request) -> bytes:
    version = parser.get_http_version().encode()
    lines = [parser.get_method() + b" " + request.url + b" HTTP/" + version]
    for name, value in request.headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(it for it in tokens if it.lower() not in _OFFER)  # noqa: PLW2901
            if not value:
                continue
        if name not in _OFFER:
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
