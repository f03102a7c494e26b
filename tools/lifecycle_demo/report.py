"""The report: what is left on the server, and which promises were broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from .clients import DemoStats
from .view import size


def left(status: dict[str, Any]) -> dict[str, int]:
    """Return what must be nothing once all is quiet, by name."""
    payloads, requests = status["payloads"], status["in_flight"]
    sessions = status["sessions"]
    # Without an engine nothing is known of it, which is not nothing.
    engine = status["engine"]["status"] or {"live": 1, "backend": {}}
    backend = engine["backend"]
    return {
        "leases of payloads": payloads["admitted"] - payloads["released"],
        "bytes admitted": payloads["bytes_in_use"],
        "leases of requests": requests["admitted"] - requests["released"],
        "leases that only the garbage collector found": payloads["lost"]
        + requests["lost"],
        "sessions": sessions["live"] + sessions["closing"],
        "sessions whose end failed": sessions["ends_failed"],
        "payloads": sessions["payloads"],
        "engine sessions": engine["live"],
        "engine slots": backend.get("slots", 0) - backend.get("slots_free", 0),
        "bytes of payloads in the engine": backend.get("payload_bytes", 0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that the report is made from.

    Attributes:
        stats: What the clients saw.
        status: The server's last status, once it was quiet.
        peak: The API process's peak resident memory, where it can be read.
        idle: Its resident memory before the first request.
        needed: Bytes of the payloads in flight at the worst moment, had each
            been made at once and kept until its request ended.
        requests: How many were planned.
        restarted: Seconds from the kill until an engine was ready, if it was.
        exit_status: How the server ended, ``None`` if it had to be killed.
        outlived: Whether the engine's process outlived the server.
    """

    stats: DemoStats
    status: dict[str, Any]
    peak: int | None
    idle: int | None
    needed: int
    requests: int
    restarted: float | None
    exit_status: int | None
    outlived: bool

    def wrong(self) -> Iterator[str]:
        """Yield, in words, what breaks a promise."""
        for what, count in left(self.status).items():
            if count:
                yield f"{what} left: {count}"
        yield from self.stats.problems
        sessions = self.status["sessions"]
        if sessions["opened"] != sum(sessions["outcomes"].values()):
            yield f"{sessions['opened']} sessions opened, other number of outcomes"
        if self.restarted is None:
            yield "the engine was not killed, or did not come back"
        if self.requests != (ended := sum(self.stats.endings.values())):
            yield f"{self.requests} requests were planned and {ended} have ended"
        if self.outlived:
            yield "the engine's process outlived the server"
        if self.exit_status != 0:
            yield f"the server ended with status {self.exit_status}"


def show(findings: Findings, console: Console) -> int:
    """Print the report; return the exit status, 0 only if nothing is left."""
    stats, outcomes = findings.stats, findings.status["sessions"]["outcomes"]
    console.print()
    rows = [(str(count), ending) for ending, count in sorted(stats.endings.items())]
    for status, count in stats.retries.items():
        rows.append((str(count), f"refusals with Retry-After ({status})"))
    _print(console, "What the clients saw", rows)
    rows = [(str(count), outcome) for outcome, count in outcomes.items() if count]
    _print(
        console,
        "What the server counted its sessions as",
        sorted(rows, key=itemgetter(1)),
    )
    alone = (
        "would have been the payloads alone, had each been made at once and kept "
        "until its request ended"
    )
    rows = [
        (size(findings.idle), "before the first request"),
        (size(findings.peak), "at its peak"),
        (size(findings.needed), alone),
    ]
    _print(console, "Memory of the API process", rows)
    remains = left(findings.status).items()
    _print(console, "What is left", [(str(count), what) for what, count in remains])
    wrong = list(findings.wrong())
    for line in wrong:
        console.print(f"[bold red]wrong:[/] {line}")
    if not wrong:
        console.print("[bold green]Nothing is left behind.[/]")
    return 1 if wrong else 0


def _print(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", min_width=9)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    console.print(f"[bold]{title}[/]")
    console.print(table)
    console.print()
