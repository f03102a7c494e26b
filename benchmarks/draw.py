"""Draw the experiments: ``docs/memory.svg``, ``overload.svg``, ``peers_*.svg``.

    python benchmarks/draw.py [--check] [memory] [overload] [peers_vllm]
        [peers_lmdeploy]

The figures are those in ``benchmarks/results``. With ``--check`` nothing is written,
and the exit status tells whether the files are what this script draws.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _charts import AMBER, BLUE, GREEN, GREY, RED, Panel, key, picture, text, ticks

_ROOT = Path(__file__).resolve().parents[1]
_GIB = 2**30
_MIB = 2**20
_HALVES = (RED, AMBER, AMBER, BLUE, GREY, GREEN)
_WAYS = {"gate": GREEN, "none": GREY, "semaphore": AMBER}
_LABELS = {"gate": "gate", "none": "no limit", "semaphore": "semaphore"}
Row = dict[str, Any]


def main() -> int:
    """Run the command line."""
    arguments = sys.argv[1:]
    names = [name for name in _PICTURES if name in arguments] or list(_PICTURES)
    stale = 0
    for name in names:
        found = json.loads((_ROOT / "benchmarks/results" / f"{name}.json").read_text())
        drawn, out = _PICTURES[name](found), _ROOT / "docs" / f"{name}.svg"
        if "--check" in arguments:
            stale += not out.exists() or out.read_text() != drawn
        else:
            out.write_text(drawn)
    return int(stale > 0)


def memory(found: dict[str, Any]) -> str:
    """Draw the memory of both processes."""
    series = found["series"]
    panels = [
        _over_time(series["halves"]),
        _halves(series["halves"]),
        _gates(series["processing"]),
        _clients(series["clients"], found["budget"]["clients"]),
    ]
    parts = [part for panel in panels for part in panel.parts]
    label = "Memory of the server, by gate limit and by which process frees payloads"
    return picture(960, 640, label, parts)


def _of(runs: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """Return least, median and most of a figure."""
    values = [run[name] for run in runs if run[name] is not None]
    return min(values), statistics.median(values), max(values)


def _extra(runs: Sequence[dict[str, Any]], unit: float) -> tuple[float, float, float]:
    """Return least, median and most of the peak above idle memory."""
    values = [(run["peak"] - run["before"]) / unit for run in runs]
    return min(values), statistics.median(values), max(values)


def _over_time(rows: list[Row]) -> Panel:
    panel = Panel(24, 10, 452, 300, left=40)
    shown = [(row, colour) for row, colour in zip(rows, _HALVES, strict=False)]
    lines = [
        [(at, sum(sizes[2:]) / _GIB) for at, *sizes in row["runs"][0]["series"]]
        for row, _ in shown
    ]
    count, size = rows[0]["case"]["clients"], rows[0]["case"]["pixels"] * 24 / _MIB
    panel.titles(
        f"{count} long streams, payloads of {size:.0f} MiB",
        "proportional set size of both processes; colors as on the right",
    )
    y = panel.heights(ticks(max(v for line in lines for _, v in line)), " GiB")
    x = panel.widths(ticks(max(at for line in lines for at, _ in line)), " s")
    for (_, colour), line in zip(shown, lines, strict=True):
        panel.line(((x(at), y(value)) for at, value in line), colour)
    return panel


def _halves(rows: list[Row]) -> Panel:
    panel = Panel(500, 10, 440, 300, left=132)
    runs = len(rows[0]["runs"])
    panel.titles(
        "Which process frees payloads",
        f"peak above idle; median and range of {runs} runs",
    )
    peaks = [_extra(row["runs"], _GIB) for row in rows]
    x = panel.widths(ticks(max(high for _, _, high in peaks)), " GiB")
    for i, (row, peak) in enumerate(zip(rows, peaks, strict=True)):
        _row(panel, x, i, len(rows), row["case"]["name"], peak, _HALVES[i])
    return panel


def _row(
    panel: Panel,
    x: Callable[[float], float],
    place: int,
    places: int,
    name: str,
    values: tuple[float, float, float],
    colour: str,
) -> None:
    """Draw a horizontal bar with its name on the left."""
    span = (panel.foot - panel.top) / places
    y = panel.top + span * place
    low, middle, high = values
    panel.bar(panel.left, y + 5, x(middle) - panel.left, span - 10, colour)
    panel.across(y + span / 2, x(low), x(high))
    panel.parts.append(text(panel.left - 8, y + span / 2 + 4, name, "end"))


def _gates(rows: list[Row]) -> Panel:
    panel = Panel(24, 326, 452, 300, left=48)
    panel.titles(
        "Both free payloads: limit of the gate",
        "peak above idle; requests per second below",
    )
    peaks = [_extra(row["runs"], _MIB) for row in rows]
    y = panel.heights(ticks(max(high for _, _, high in peaks)), " MiB")
    places = panel.steps([row["case"]["name"] for row in rows], "")
    for row, place, (low, middle, high) in zip(rows, places, peaks, strict=True):
        panel.bar(place - 18, y(middle), 36, panel.foot - y(middle), BLUE)
        panel.upright(place, y(low), y(high))
        rate = _of(row["runs"], "rate")[1]
        panel.parts.append(_small(place, panel.foot + 31, f"{rate:.1f}/s"))
    return panel


def _small(x: float, y: float, words: str) -> str:
    return text(x, y, words, "small middle")


def _clients(rows: list[Row], budget: int) -> Panel:
    panel = Panel(500, 326, 440, 300, left=48)
    size = rows[0]["case"]["pixels"] * 24 / _MIB
    panel.titles(
        "Concurrent clients behind a gate",
        f"peak above idle, payloads of {size:.0f} MiB",
    )
    peaks = [_extra(row["runs"], _GIB) for row in rows]
    most = max(budget / _GIB, *(high for _, _, high in peaks))
    y = panel.heights(ticks(most * 1.1), " GiB")
    panel.limit(y(budget / _GIB), "limit of the gate")
    names = [str(row["case"]["clients"]) for row in rows]
    places = panel.steps(names, "concurrent clients")
    middles = [middle for _, middle, _ in peaks]
    panel.line(zip(places, map(y, middles), strict=True), GREEN)
    for place, (low, middle, high) in zip(places, peaks, strict=True):
        panel.upright(place, y(low), y(high))
        panel.dot(place, y(middle), GREEN)
    return panel


def overload(found: dict[str, Any]) -> str:
    """Draw goodput and latency under overload."""
    settings, rows = found["settings"], found["rows"]
    figures = (
        ("goodput", "Goodput", "answers within the deadline, per second"),
        (
            "p99",
            "Latency of answers",
            "p99 of answers within the deadline, ms",
        ),
        ("refusal_p99", "Latency of refusals", "p99, ms"),
    )
    parts = key(24, 342, [(_LABELS[way], colour) for way, colour in _WAYS.items()])
    for i, (name, title, about) in enumerate(figures):
        panel = Panel(24 + 312 * i, 10, 300, 310, left=42)
        panel.titles(title, about)
        _lines(panel, rows, name)
        parts += panel.parts
    label = f"Overload of a server of {settings['capacity']:.0f} requests a second"
    return picture(960, 362, label, parts)


def _lines(panel: Panel, rows: list[Row], name: str) -> None:
    loads = sorted({row["load"] for row in rows})
    values = [run[name] for row in rows for run in row["runs"] if run[name] is not None]
    y = panel.heights(ticks(max(values, default=1.0)), "")
    places = panel.steps([f"{load:g}" for load in loads], "offered load / capacity")
    at = dict(zip(loads, places, strict=True))
    for shift, (way, colour) in enumerate(_WAYS.items()):
        found = [
            (at[row["load"]] + 5 * shift - 5, _of(row["runs"], name))
            for row in rows
            if row["way"] == way and any(run[name] is not None for run in row["runs"])
        ]
        panel.line(((x, y(middle)) for x, (_, middle, _) in found), colour)
        for x, (low, middle, high) in found:
            panel.upright(x, y(low), y(high))
            panel.dot(x, y(middle), colour)


def peers_vllm(found: dict[str, Any]) -> str:
    """Draw the memory of vLLM's API server, with and without `Admission`."""
    return peer(found, "vLLM", found["settings"]["vllm"])


def peers_lmdeploy(found: dict[str, Any]) -> str:
    """Draw the memory of LMDeploy's API server, with and without `Admission`."""
    return peer(found, "LMDeploy", found["settings"]["lmdeploy"])


def peer(found: dict[str, Any], name: str, version: str) -> str:
    """Draw the memory of a server, with and without `Admission`."""
    settings, rows = found["settings"], found["rows"]
    panel = Panel(24, 10, 600, 320, left=48)
    panel.titles(
        f"{name} {version}: clients that each send a picture at the same time",
        f"its memory above idle, {settings['pixels'] / 1e6:.0f} megapixels each",
    )
    grown = {
        (row["way"], row["clients"]): (row["peak"] - row["base"]) / 1024 for row in rows
    }
    budget = settings["budget_mib"] / 1024
    y = panel.heights(ticks(max(grown.values()) * 1.1), " GiB")
    panel.limit(y(budget), "")
    panel.parts.append(
        text(panel.right, y(budget) - 8, "budget of Admission", "end", RED)
    )
    counts = sorted({row["clients"] for row in rows})
    places = panel.steps([str(count) for count in counts], "clients")
    for way, colour in (("none", GREY), ("admission", GREEN)):
        heights = [y(grown[way, count]) for count in counts]
        panel.line(zip(places, heights, strict=True), colour)
        for place, height in zip(places, heights, strict=True):
            panel.dot(place, height, colour)
    for row in rows:
        if row["died"]:
            place = places[counts.index(row["clients"])]
            lost = sum(row["answers"].values()) - row["answers"].get("200", 0)
            height = y(grown[row["way"], row["clients"]])
            words = f"killed, {lost} requests lost"
            panel.parts.append(text(place - 10, height + 4, words, "end", RED))
    parts = key(24, 360, [(name, GREY), (f"{name} behind Admission", GREEN)])
    label = f"Memory of {name}'s API server with and without Admission"
    return picture(648, 380, label, panel.parts + parts)


_PICTURES = {
    "memory": memory,
    "overload": overload,
    "peers_vllm": peers_vllm,
    "peers_lmdeploy": peers_lmdeploy,
}

if __name__ == "__main__":
    sys.exit(main())
