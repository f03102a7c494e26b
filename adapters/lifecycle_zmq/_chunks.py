"""One tick of outputs in as few messages as the caps allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import wire
from ._backend import Finish
from ._errors import EncodeError

# key, index of the first item, items, finish or None: as CHUNKS carries it.
Entry = list[Any]


def finish_map(finish: Finish | None) -> dict[str, Any] | None:
    """Return `finish` as CHUNKS carries it."""
    if finish is None:
        return None
    if finish.reason != "failed":
        return {"reason": finish.reason}
    code, message = finish.code[: wire.MAX_CODE], finish.message[: wire.MAX_TEXT]
    return {"reason": "failed", "error": {"code": code, "message": message}}


def write(
    entries: list[Entry], send: Callable[[list[Entry]], None], spoiled: set[str]
) -> None:
    """Send `entries` with `send`, in halves where one message cannot hold them.

    A stream with an item that no message can hold fails, alone.

    Args:
        entries: What to send, in order.
        send: Sends one message or raises `EncodeError`, having sent nothing.
        spoiled: Receives the keys of the streams that failed here.
    """
    entries = [entry for entry in entries if entry[0] not in spoiled]
    if not entries:
        return
    try:
        send(entries)
    except EncodeError as error:
        halves = _halve(entries)
        if not halves:
            key, first = entries[0][:2]
            spoiled.add(key)
            failure = Finish("failed", error.code, "an item cannot be sent")
            send([[key, first, [], finish_map(failure)]])
        for half in halves:
            write(half, send, spoiled)


def _halve(entries: list[Entry]) -> list[list[Entry]]:
    if len(entries) > 1:
        middle = len(entries) // 2
        return [entries[:middle], entries[middle:]]
    key, first, items, finish = entries[0]
    if len(items) > 1:
        middle = len(items) // 2
        head, tail = items[:middle], items[middle:]
        return [[[key, first, head, None]], [[key, first + middle, tail, finish]]]
    return []
