"""Tables and goals of the memory experiment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from _figures import goal, spread
from rich.box import SIMPLE
from rich.table import Table

_MIB = 2**20
GATES = ("processing", "engine")
"""The series that compare gates: what their throughput is limited by."""
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
    measured = [row for row in rows if row["runs"]]
    cells = list(_gates(measured) if name in GATES else _processes(measured))
    for head in (*cells[0], "answered") if cells else ():
        shown.add_column(head, justify="right", no_wrap=True)
    for row, figures in zip(measured, cells, strict=True):
        failed = sum(run["failed"] for run in row["runs"])
        asked = len(row["runs"]) * row["case"]["clients"]
        answered = {"answered": f"{asked - failed}/{asked}"}
        shown.add_row(row["case"]["name"], *(figures | answered).values())
    return shown


def _processes(rows: list[Row]) -> Iterator[dict[str, str]]:
    """Yield the memory of each process, in MiB, and the throughput."""
    for row in rows:
        runs = row["runs"]
        yield {
            "above rest, MiB": spread([extra(run) / _MIB for run in runs]),
            "API, MiB": spread([run["api"] / _MIB for run in runs]),
            "engine, MiB": spread([run["engine"] / _MIB for run in runs]),
            "requests/s": spread([run["rate"] for run in runs], 1),
        }


def _gates(rows: list[Row]) -> Iterator[dict[str, str]]:
    """Yield throughput and peak of each gate, with their change from no gate."""
    for row in rows:
        less = 1 - median(row, _peak) / median(rows[0], _peak)
        yield {
            "requests/s": spread([run["rate"] for run in row["runs"]], 1),
            "change": f"{against(row, rows[0]) - 1:+.1%}",
            "peak, MiB": spread([run["peak"] / _MIB for run in row["runs"]]),
            "reduction": f"{less:.1%}",
        }


def goals(found: dict[str, Any]) -> Iterator[str]:
    """Yield each goal with its value and whether it is reached."""
    series, budget = found["series"], found["budget"]
    cases = [("halves", "both free, gate"), *((name, "512 MiB") for name in GATES)]
    for name, case in cases:
        row = named(series.get(name, []), case)
        if row and row["runs"]:
            share = max(map(extra, row["runs"])) / budget[name]
            yield goal(f"{name}, {case}: peak over budget", share, most=1.15)
    for name, case, most in (("processing", "512 MiB", 0.02), ("engine", "1", 0.05)):
        rows = series.get(name, [])
        off, gate = named(rows, "off"), named(rows, case)
        if off and gate and off["runs"] and gate["runs"]:
            what = f"{name}: throughput lost to the gate {case}"
            yield goal(what, 1 - against(gate, off), most=most)
    clients = [row for row in series.get("clients", []) if row["runs"]]
    if clients:
        share = max(extra(run) for row in clients for run in row["runs"])
        yield goal("clients: peak over budget", share / budget["clients"], most=1.15)
    if len(clients) > 1:
        few, many = (median(row, _peak) for row in (clients[0], clients[-1]))
        yield goal("growth of the peak, few to many clients", many / few - 1, most=0.03)


def _peak(run: dict[str, Any]) -> float:
    return float(run["peak"])
