"""Table and goals of the overload experiment."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from _figures import goal, spread
from rich.box import SIMPLE
from rich.table import Table

Row = dict[str, Any]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile of the values; ``None`` without values."""
    ordered = sorted(values)
    return (
        ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
    )


def figures(row: Row, name: str) -> list[float]:
    """Return a figure of each run of a row that has it."""
    return [run[name] for run in row["runs"] if run.get(name) is not None]


def median(row: Row, name: str) -> float:
    """Return the median of a figure over the runs of a row; NaN without runs."""
    found = figures(row, name)
    return float(statistics.median(found)) if found else float("nan")


def of_way(found: dict[str, Any], way: str) -> list[Row]:
    """Return the measured rows of one server, by increasing load."""
    return [row for row in found["rows"] if row["way"] == way and row["runs"]]


def table(found: dict[str, Any]) -> Table:
    """Return a table: median, minimum and maximum of each case."""
    settings = found["settings"]
    shown = Table(
        title=f"{settings['capacity']:.0f} requests/s are served, "
        f"clients wait {settings['deadline']:g} s; p99 in ms",
        box=SIMPLE,
    )
    columns = {
        "goodput": "goodput/s",
        "refused": "refused/s",
        "late": "timeouts/s",
        "p99": "p99 of answers",
        "refusal_p99": "p99 of refusals",
        "served_p99": "the server's",
        "lateness_p99": "its clients'",
        "load": "CPU of clients",
    }
    for head in ("", "load", *columns.values()):
        shown.add_column(head, justify="right")
    for row in found["rows"]:
        if row["runs"]:
            cells = [_spread(row, name) for name in columns]
            shown.add_row(row["way"], f"{row['load']:g}", *cells)
    return shown


def _spread(row: Row, name: str) -> str:
    values = figures(row, name)
    if not values:
        return "-"
    digits = {"load": 2, "goodput": 0, "refused": 0, "late": 0, "p99": 0}.get(name, 1)
    return spread(values, digits)


def goals(found: dict[str, Any]) -> Iterator[str]:
    """Yield each goal of the gate with its value and whether it is reached."""
    gate = {row["load"]: row for row in of_way(found, "gate")}
    if not {1.0, 10.0} <= set(gate):
        return
    most = max(median(row, "goodput") for row in gate.values())
    share = median(gate[10.0], "goodput") / most
    yield goal("goodput at 10 times, of the peak", share, least=0.95)
    times = median(gate[10.0], "p99") / median(gate[1.0], "p99")
    yield goal("p99 of answers at 10 times, over that at once", times, most=1.3)
    for name, whose in (("refusal_p99", ""), ("served_p99", ", without its clients'")):
        if slowest := figures(gate[10.0], name):
            what = f"p99 of refusals at 10 times{whose}, ms"
            yield goal(what, statistics.median(slowest), most=5.0)
