"""Incremental detokenizers: bytes first, characters once they are whole."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence


class ByteDetokenizer:
    """Text of a stream whose tokens are known byte strings.

    Each token adds its bytes; the decoder holds back at most the three bytes of
    an unfinished character. Bytes that can never become UTF-8 are U+FFFD, one
    for each maximal broken part, as the tokenizers library writes them.
    """

    __slots__ = ("_bytes_of", "_decoder", "_strip")

    def __init__(self, bytes_of: Mapping[int, bytes], *, strip: bool = False) -> None:
        """Start a stream.

        Args:
            bytes_of: The bytes of each token id. An id without any (a control
                token, or one of the rows that a vocabulary is padded with) is
                no text.
            strip: Leave out the space that the text begins with, if it does.
        """
        self._bytes_of = bytes_of
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids and return the text that they complete."""
        data = b"".join([self._bytes_of.get(i, b"") for i in ids])
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def spell(self, token: int) -> bytes:
        """Return the bytes of one token, whatever was pushed."""
        return self._bytes_of.get(token, b"")

    def flush(self) -> str:
        """Return what is left; U+FFFD for half a character."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """Map the letters of a byte-level BPE to the bytes that they stand for.

    Printable bytes stand for themselves; the others are shifted behind U+0100 in
    order, as GPT-2 introduced it.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
