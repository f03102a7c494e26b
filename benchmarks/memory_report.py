"""Tables and goals of the memory experiment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

_MIB = 2**20
Row = dict[str, Any]


def extra(run: dict[str, Any]) -> int:
    """Return the peak memory of both processes above their memory before the run."""
    return int(run["peak"] - run["before"])


def failed(found: dict[str, Any]) -> int:
    """Return the number of requests without a complete answer."""
    rows = [row for rows in found["series"].values() for row in rows]
    return sum(int(run["failed"]) for row in rows for run in row["runs"])


def median(row: Row, of: Callable[[dict[str, Any]], float]) -> float:
    """Return the median over the runs of a row."""
    return float(statistics.median(of(run) for run in row["runs"]))


def named(rows: list[Row], name: str) -> Row | None:
    """Return the row of a case, if it was measured."""
    return next((row for row in rows if row["case"]["name"] == name), None)


def against(row: Row, other: Row) -> float:
    """Return the relative throughput of two rows: the median over the repetitions.

    Both runs of each ratio were made in the same minute.
    """
    rates = {run["turn"]: run["rate"] for run in other["runs"]}
    pairs = [
        run["rate"] / rates[run["turn"]] for run in row["runs"] if run["turn"] in rates
    ]
    return float(statistics.median(pairs))


def table(name: str, rows: list[Row]) -> Table:
    """Return a table of a series: median, minimum and maximum of each case."""
    case = rows[0]["case"]
    payload = case["pixels"] * 24 / _MIB
    shown = Table(title=f"{name}: payloads of {payload:.0f} MiB", box=SIMPLE)
    shown.add_column("", no_wrap=True)
    for head in ("above rest, MiB", "API, MiB", "engine, MiB", "requests/s", "failed"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        if row["runs"]:
            shown.add_row(
                row["case"]["name"],
                _spread([extra(run) / _MIB for run in row["runs"]]),
                _spread([run["api"] / _MIB for run in row["runs"]]),
                _spread([run["engine"] / _MIB for run in row["runs"]]),
                _spread([run["rate"] for run in row["runs"]], 1),
                str(sum(run["failed"] for run in row["runs"])),
            )
    return shown


def _spread(values: list[float], digits: int = 0) -> str:
    low, high = min(values), max(values)
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def goals(found: dict[str, Any]) -> Iterator[str]:
    """Yield each goal with its value and whether it is reached."""
    series, budget = found["series"], found["budget"]
    for name, case in (("halves", "both free, gate"), ("gates", "512 MiB")):
        row = named(series.get(name, []), case)
        if row and row["runs"]:
            share = max(map(extra, row["runs"])) / budget[name]
            yield _goal(f"{name}, {case}: peak over budget", share, 1.15)
    gates = series.get("gates", [])
    off, by_bytes = named(gates, "off"), named(gates, "512 MiB")
    if off and by_bytes and off["runs"]:
        lost = 1 - against(by_bytes, off)
        yield _goal("throughput lost to the gate over bytes", lost, 0.02)
    clients = [row for row in series.get("clients", []) if row["runs"]]
    if clients:
        share = max(extra(run) for row in clients for run in row["runs"])
        yield _goal("clients: peak over budget", share / budget["clients"], 1.15)
    if len(clients) > 1:
        few, many = (median(row, _peak) for row in (clients[0], clients[-1]))
        yield _goal("growth of the peak, few to many clients", many / few - 1, 0.03)


def _peak(run: dict[str, Any]) -> float:
    return float(run["peak"])


def _goal(what: str, value: float, limit: float) -> str:
    verdict = "reached" if value <= limit else "MISSED"
    return f"{what}: {value:.3f}, at most {limit}: {verdict}"
