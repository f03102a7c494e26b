"""A snapshot of a live view as text: the cells of tables, and lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from lifecycle_asgi.memory_limit import size_text

REQUEST_COLUMNS = (
    "id",
    "request",
    "client",
    "phase",
    "waits for",
    "age",
    "held",
    "tokens",
    "per s",
)
GATE_COLUMNS = ("gate", "in use", "", "waiting", "refused")
CLIENT_COLUMNS = ("client", "requests", "held")
_WARNED = "bold dark_orange"
_BAR_CELLS = 12


def size(nbytes: float) -> str:
    """Return *nbytes* with a unit; nothing for none."""
    return size_text(nbytes) if nbytes else ""


def request_cells(each: Mapping[str, Any]) -> list[Text]:
    """Return a row of the table of requests, coloured if there is a warning."""
    style = _WARNED if each["warnings"] else ""
    words = [each["id"], each["what"], each["client"], each["phase"]]
    words.append(each.get("waits_for", ""))  # an older server lacks it
    numbers = [
        f"{each['age_s']:.1f} s",
        size(each["bytes"]),
        str(each["tokens"] or ""),
        str(each["rate"] or ""),
    ]
    return [
        *(Text(word, style) for word in words),
        *(Text(number, style, justify="right") for number in numbers),
    ]


def gate_cells(each: Mapping[str, Any]) -> list[Text]:
    """Return a row of the table of gates, with a bar of what is in use."""
    used, full = [], 0.0
    if each["slots"] is not None:
        used.append(f"{each['slots_in_use']} of {each['slots']}")
        full = each["slots_in_use"] / max(1, each["slots"])
    if each["bytes"] is not None:
        used.append(f"{size(each['bytes_in_use']) or '0 B'} of {size(each['bytes'])}")
        full = max(full, each["bytes_in_use"] / max(1, each["bytes"]))
    if not used:
        used.append(f"{each['slots_in_use']}, no limit")
    filled = min(_BAR_CELLS, round(full * _BAR_CELLS))
    style = _WARNED if each["waiting"] else ""
    bar = "━" * filled
    return [
        Text(each["name"], style),
        Text(", ".join(used), style),
        Text.assemble((bar, style or "green"), ("─" * (_BAR_CELLS - filled), "dim")),
        Text(str(each["waiting"] or ""), style, justify="right"),
        Text(str(each["refused"] or ""), justify="right"),
    ]


def client_cells(each: Mapping[str, Any]) -> list[Text]:
    """Return a row of the table of clients."""
    return [
        Text(each["client"]),
        Text(str(each["requests"]), justify="right"),
        Text(size(each["bytes"]), justify="right"),
    ]


def warning_lines(event: Mapping[str, Any], most: int) -> Text:
    """Return a line for each of the first *most* warnings."""
    warnings = event["warnings"]
    if not warnings:
        return Text("no warnings", "dim")
    lines = [
        Text.assemble((each["kind"], _WARNED), "  ", each["text"])
        for each in warnings[:most]
    ]
    if (more := event["warnings_total"] - most) > 0:
        lines.append(Text(f"and {more} more", "dim"))
    return Text("\n").join(lines)


def summary(event: Mapping[str, Any]) -> Text:
    """Return the line about the process, the engine and the phases."""
    phases = [f"{count} {phase}" for phase, count in event["phases"].items()]
    parts = [f"process {event['pid']}", f"{event['uptime_s']:.0f} s up"]
    if engine := event["engine"]:
        restarts = f"{engine['restarts']} restart{'s' * (engine['restarts'] != 1)}"
        state = f"engine {engine['health']}, incarnation {engine['incarnation']}"
        parts.append(f"{state}, {restarts}")
    parts.append(f"{event['total']} requests" + (": " * bool(phases)))
    return Text(" · ".join(parts) + ", ".join(phases))


def holder_lines(found: Mapping[str, list[str]] | str) -> Text:
    """Return what holds the bytes of a request."""
    if isinstance(found, str):
        return Text(found)
    lines = []
    for what, places in found.items():
        lines += [Text(what, "bold"), *(Text(f"  {place}") for place in places)]
    return Text("\n").join(lines) if lines else Text("It holds nothing.")
