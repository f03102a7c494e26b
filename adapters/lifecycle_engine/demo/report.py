"""What is left at the end, and whether that is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lifecycle_engine.demo.clients import Ledger
from lifecycle_engine.demo.view import size


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
        charged: Bytes that the gate charged over the whole run.
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

    def left(self) -> dict[str, int]:
        """Return what must be nothing."""
        gate, sessions = self.status["gate"], self.status["sessions"]
        engine = self.status["engine"]
        return {
            "leases": gate["admitted"] - gate["released"],
            "admitted bytes": gate["bytes_in_use"],
            "leases found by the collector": gate["lost"],
            "sessions": sessions["live"] + sessions["closing"],
            "payloads": sessions["payloads"],
            "engine sessions": engine["sessions"],
        }

    def wrong(self) -> Iterator[str]:
        """Yield, in words, what breaks a promise."""
        for what, count in self.left().items():
            if count:
                yield f"{count} {what} left"
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
    for what, count in findings.left().items():
        table.add_row(str(count), what, style="bold red" if count else "green")
    console.print(table)

    wrong = list(findings.wrong())
    for line in wrong:
        console.print(f"[bold red]wrong[/] {line}")
    if not wrong:
        console.print("[bold green]nothing is left behind[/]")
    return 1 if wrong else 0
