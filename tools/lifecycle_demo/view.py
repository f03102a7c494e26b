"""The live view of what the server holds, polled while the demo runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
from rich.console import Console
from rich.live import Live
from rich.table import Table

from .clients import DemoStats
from .server import Server
from .traffic import Phase

# What a session's phase says of the request; only its client knows of tokens.
NAMES: dict[str, Phase] = {
    "open": "queued",
    "starting": "preprocessing",
    "started": "before the first token",
}
INTERVAL = 0.1
LINE_EVERY = 2.0
"""Seconds between two lines where there is no terminal to draw on."""


@dataclass(slots=True)
class View:
    """The newest answer of ``/_lifecycle/status``, shown while it changes.

    Attributes:
        server: The server that is asked.
        stats: What the clients saw, shown beside it.
        status: The answer; empty before the first one.
        notes: What happened to the engine, with the second it did.
    """

    server: Server
    stats: DemoStats
    console: Console
    status: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=anyio.current_time)
    _phases: dict[str, Phase] = field(default_factory=dict)
    _news: anyio.Event = field(default_factory=anyio.Event)

    async def changed(self) -> None:
        """Wait until the status was read again."""
        await self._news.wait()

    def phase_of(self, request: str) -> Phase | None:
        """Return where a request is, or ``None`` if it is not in flight.

        A request that streams is still said to be before its first token.
        """
        return self._phases.get(request)

    def note(self, text: str) -> None:
        """Say what happened, now and in the live view."""
        self.notes.append(f"{self.elapsed:5.1f} s  {text}")
        if not self.console.is_terminal:
            self.console.print(self.notes[-1], soft_wrap=True, highlight=False)

    @property
    def elapsed(self) -> float:
        """Seconds since the traffic began."""
        return anyio.current_time() - self.began

    async def refresh(self) -> None:
        """Read the status once and wake the tasks that wait for it."""
        rows = (await self.server.get("/_lifecycle/requests"))["requests"]
        phases = {row["id"]: row["session_phase"] for row in rows}
        self._phases = {id_: NAMES[it] for id_, it in phases.items() if it in NAMES}
        self.status = await self.server.get("/_lifecycle/status")
        news, self._news = self._news, anyio.Event()
        news.set()

    async def follow(self) -> None:
        """Read and show the status until cancelled."""
        if self.console.is_terminal:
            with Live(self.table(), console=self.console, transient=True) as live:
                while True:
                    await self.refresh()
                    live.update(self.table())
                    await anyio.sleep(INTERVAL)
        printed = -LINE_EVERY
        while True:
            await self.refresh()
            if self.elapsed - printed >= LINE_EVERY:
                printed = self.elapsed
                self.console.print(self.line(), soft_wrap=True, highlight=False)
            await anyio.sleep(INTERVAL)

    @property
    def ended(self) -> int:
        """Requests whose client has seen an end."""
        return sum(self.stats.endings.values())

    @property
    def running(self) -> int:
        """Requests that the engine decodes at this moment."""
        engine = self.status["engine"]["status"]
        return engine["backend"]["running"] if engine else 0

    def line(self) -> str:
        """Return the state in one line."""
        phases = self.status["sessions"]["phases"]
        return (
            f"{self.elapsed:5.1f} s   queued {phases.get('open', 0):2}   "
            f"preprocessing {phases.get('starting', 0):2}   "
            f"with the engine {phases.get('started', 0):2}   "
            f"admitted {size(self.status['payloads']['bytes_in_use']):>8}   "
            f"memory {size(self.server.resident()):>8}   "
            f"engine {self.engine()}   ended {self.ended:3}"
        )

    def engine(self) -> str:
        """Return what there is to say of the engine."""
        engine = self.status["engine"]
        return f"no. {engine['incarnation']}" if engine["ready"] else "down "

    def table(self) -> Table:
        """Return the state as a table."""
        table = Table.grid(padding=(0, 2))
        if not self.status:
            return table
        gate, sessions = self.status["payloads"], self.status["sessions"]
        phases = sessions["phases"]
        table.add_row("elapsed", f"{self.elapsed:.1f} s")
        for phase, name in (
            ("open", "queued"),
            ("starting", "preprocessing"),
            ("started", "with the engine"),
        ):
            count = phases.get(phase, 0)
            table.add_row(name, f"{count:3} {'█' * count}")
        table.add_row(
            "admitted", f"{size(gate['bytes_in_use'])} of {size(gate['bytes'])}"
        )
        table.add_row("memory", f"{size(self.server.resident())} in the API process")
        table.add_row("engine", f"{self.engine()}, decoding {self.running}")
        table.add_row("ended", f"{self.ended}")
        for ending, count in sorted(self.stats.endings.items()):
            table.add_row("", f"{count:3} {ending}")
        for note in self.notes:
            table.add_row("", note)
        return table


def size(count: float | None) -> str:
    """Return bytes for people: ``"—"`` for unknown, else MiB or GiB."""
    if count is None:
        return "—"
    mib = count / 2**20
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
