"""What is left at the end, and whether that is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lifecycle_engine.demo.clients import Ledger
from lifecycle_engine.demo.view import size


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
        ledger: What the clients saw.
        status: The server's last status, once it was quiet.
        peak: The API process's peak resident memory, where it can be read.
        idle: Its resident memory before the first request.
        needed: Bytes of the payloads in flight at the worst moment, had each
            been made at once and kept until its request ended.
        restarted: Seconds from the kill until an engine was ready, if it was.
        exit_status: How the server ended, ``None`` if it had to be killed.
    """

    ledger: Ledger
    status: dict[str, Any]
    peak: int | None
    idle: int | None
    needed: int
    restarted: float | None
    exit_status: int | None

    def wrong(self) -> Iterator[str]:
        """Yield, in words, what breaks a promise."""
        for what, count in left(self.status).items():
            if count:
                yield f"{what} left: {count}"
        yield from self.ledger.wrong
        sessions = self.status["sessions"]
        if sessions["opened"] != sum(sessions["outcomes"].values()):
            yield f"{sessions['opened']} sessions opened, other number of outcomes"
        if self.restarted is None:
            yield "the engine did not come back"
        if self.exit_status != 0:
            yield f"the server ended with status {self.exit_status}"


def show(findings: Findings, console: Console) -> int:
    """Print the report; return the exit status, 0 only if nothing is left."""
    console.print()
    table = Table(title="what the clients saw", title_justify="left")
    table.add_column("requests", justify="right")
    table.add_column("ending")
    for ending, count in sorted(findings.ledger.seen.items()):
        table.add_row(str(count), ending)
    for status, count in sorted(findings.ledger.told.items()):
        table.add_row(
            str(count), f"times told to come back later ({status})", style="dim"
        )
    console.print(table)

    table = Table(title="what the server counted", title_justify="left")
    table.add_column("sessions", justify="right")
    table.add_column("outcome")
    for outcome, count in sorted(findings.status["sessions"]["outcomes"].items()):
        if count:
            table.add_row(str(count), outcome)
    console.print(table)

    table = Table(title="memory of the API process", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("")
    table.add_row(size(findings.idle), "before the first request")
    table.add_row(size(findings.peak), "at its peak")
    table.add_row(
        size(findings.needed),
        "the payloads in flight at the worst moment, "
        "had each been made at once and kept until its request ended",
    )
    console.print(table)

    table = Table(title="left behind", title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("")
    for what, count in left(findings.status).items():
        table.add_row(str(count), what, style="bold red" if count else "green")
    console.print(table)

    wrong = list(findings.wrong())
    for line in wrong:
        console.print(f"[bold red]wrong[/] {line}")
    if not wrong:
        console.print("[bold green]nothing is left behind[/]")
    return 1 if wrong else 0
