"""From a stream of tokens to pieces of text: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.lowlevel

from lifecycle_engine.processor import Detokenizer
from lifecycle_zmq import EngineFailed

from .openai_wire import Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a text.

    Attributes:
        text: May be empty, while characters or stop strings are undecided.
        logprobs: Of the tokens that came, in the form of the API; ``None`` if
            nobody asked.
    """

    text: str = field(repr=False)
    logprobs: list[dict[str, Any]] | None = field(default=None, repr=False)


class StopStrings:
    """Cuts a text at the first of some strings, however it is cut into pieces.

    Args:
        strings: None of them empty; may be none at all.

    Attributes:
        hit: The one that was found.
    """

    __slots__ = ("_held", "_strings", "hit")

    hit: str | None

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.hit = None

    def push(self, text: str) -> str:
        """Take further text; return what is certain to stand before any stop."""
        if not self._strings:
            return text
        held = self._held + text
        # The one that is whole first, which is so in any pieces; then the longest.
        places = [
            (at + len(each), at, each)
            for each in self._strings
            if (at := held.find(each)) >= 0
        ]
        if places:
            self._held = ""
            _, at, self.hit = min(places)
            return held[:at]
        keep = max(_overlap(held, each) for each in self._strings)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return what was held back, when no text will follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of *text* that *stop* begins with."""
    longest = min(len(text), len(stop) - 1)
    return next(size for size in range(longest, -1, -1) if text.endswith(stop[:size]))


class Texts:
    """The text of a stream of tokens, and why it ended.

    An iterator and not a generator: a generator that is left is closed by the
    garbage collector, in another task.

    Args:
        items: Of the engine.
        detokenizer: Fresh.
        usage: Counts the tokens.
        stop: Strings that end the text and are not part of it.

    Attributes:
        finish_reason: Known when the iteration is over.
    """

    def __init__(
        self,
        items: AsyncIterator[Any],
        detokenizer: Detokenizer,
        usage: Usage,
        stop: Sequence[str] = (),
    ) -> None:
        self._items = items
        self._detokenizer = detokenizer
        self._usage = usage
        self._stops = StopStrings(stop)
        self._over = False
        self.finish_reason = ""

    def __aiter__(self) -> Texts:
        return self

    async def __anext__(self) -> Piece:
        if self._over:
            raise StopAsyncIteration
        async for item in self._items:
            if isinstance(item, dict) and "finish_reason" in item:
                self.finish_reason = str(item["finish_reason"])
                continue
            if isinstance(item, dict) and "cached_tokens" in item:
                self._cached(int(item["cached_tokens"]))
                continue
            tokens = [item["token"]] if isinstance(item, dict) else item
            return Piece(self._pushed(tokens), self._logprobs(item))
        return await self._last()

    def _pushed(self, tokens: Sequence[int]) -> str:
        """The text of further tokens, up to the one that makes a stop string whole."""
        parts = []
        for token in tokens:  # however many came together, as they wait for the reader
            self._usage.completion_tokens += 1
            parts.append(self._stops.push(self._detokenizer.push([token])))
            if self._stops.hit is not None:
                # Whoever reads leaves the stream now, which ends it in the engine.
                self._over, self.finish_reason = True, "stop"
                break
        return "".join(parts)

    def _cached(self, tokens: int) -> None:
        usage = self._usage
        # Of several answers, the one that went on from the slot. An engine may be
        # anybody's, and some of our APIs tell the difference.
        usage.cached_tokens = min(max(usage.cached_tokens, tokens), usage.prompt_tokens)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.hit

    async def _last(self) -> Piece:
        self._over = True
        if not self.finish_reason:
            # Whoever ended the session ended the stream, too: hear that first.
            await anyio.lowlevel.checkpoint_if_cancelled()
            message = "the stream ended without a finish_reason"
            raise EngineFailed("stream_cut", message)
        text = self._stops.push(self._detokenizer.flush())
        if self._stops.hit is not None:
            self.finish_reason = "stop"
        return Piece(text + self._stops.flush())

    def _logprobs(self, item: Any) -> list[dict[str, Any]] | None:
        if not isinstance(item, dict):
            return None
        top = [self._spelt(token, logprob) for token, logprob in item["top"]]
        one = self._spelt(item["token"], item["logprob"])
        return [{**one, "top_logprobs": top}]

    def _spelt(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._detokenizer.spell(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}
