"""`Top`: the terminal application."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer, Static

from lifecycle_tools.top.events import NoLiveView, Viewer
from lifecycle_tools.top.rows import (
    CLIENT_COLUMNS,
    GATE_COLUMNS,
    REQUEST_COLUMNS,
    client_cells,
    gate_cells,
    holder_lines,
    request_cells,
    summary,
    warning_lines,
)

_MOST_WARNINGS: Final = 8
_RETRY_SECONDS: Final = 0.5


class Top(App[None]):
    """Shows the live view of a server until the user quits.

    Args:
        viewer: Reads the live view of the server.
    """

    TITLE = "lifecycle top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { padding: 0 1; }
    #summary { height: auto; color: $text-muted; }
    #warnings { height: auto; max-height: 9; margin: 1 0; }
    #upper { height: auto; max-height: 12; margin-bottom: 1; }
    #gates { width: 2fr; height: auto; }
    #clients { width: 1fr; height: auto; margin-left: 2; }
    #requests { height: 1fr; }
    #holders { height: auto; max-height: 10; display: none; border-top: solid $panel; }
    DataTable { background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel", "cancel request"),
        Binding("w", "holders", "what holds its bytes"),
        Binding("escape", "close", "close", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer = viewer

    def compose(self) -> ComposeResult:
        """Yield the parts of the screen."""
        yield Static(Text(f"connecting to {self._viewer.shown_url}"), id="summary")
        yield Static("", id="warnings")
        with Horizontal(id="upper"):
            yield DataTable(id="gates", cursor_type="none")
            yield DataTable(id="clients", cursor_type="none")
        yield DataTable(id="requests", cursor_type="row")
        yield Static("", id="holders")
        yield Footer()

    def on_mount(self) -> None:
        """Add the columns, and begin to read."""
        for table, columns in (
            ("gates", GATE_COLUMNS),
            ("clients", CLIENT_COLUMNS),
            ("requests", REQUEST_COLUMNS),
        ):
            for number, column in enumerate(columns):
                self._table(table).add_column(column, key=str(number))
        self._table("requests").focus()
        self.run_worker(self._read(), name="events")

    async def on_unmount(self) -> None:
        """Close the connection.

        Cancellation:
            It may stay open.
        """
        await self._viewer.aclose()

    async def _read(self) -> None:
        while True:
            try:
                await self._viewer.read(self.show)
            except NoLiveView as error:
                self.query_one("#summary", Static).update(Text(str(error), "bold red"))
            await asyncio.sleep(_RETRY_SECONDS)

    def show(self, event: dict[str, Any]) -> None:
        """Show one snapshot."""
        self.query_one("#summary", Static).update(summary(event))
        warnings = self.query_one("#warnings", Static)
        warnings.update(warning_lines(event, _MOST_WARNINGS))
        self._fill("gates", {each["name"]: gate_cells(each) for each in event["gates"]})
        self._fill(
            "clients", {each["client"]: client_cells(each) for each in event["clients"]}
        )
        self._fill(
            "requests", {each["id"]: request_cells(each) for each in event["requests"]}
        )

    def _fill(self, name: str, rows: dict[str, list[Text]]) -> None:
        """Bring a table up to date; rows that stay keep their place and the cursor."""
        table = self._table(name)
        for key in [str(key.value) for key in table.rows if key.value not in rows]:
            table.remove_row(key)
        known = {key.value for key in table.rows}
        for key, cells in rows.items():
            if key not in known:
                table.add_row(*cells, key=key)
                continue
            for number, cell in enumerate(cells):
                table.update_cell(key, str(number), cell, update_width=True)

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    @property
    def selected(self) -> str | None:
        """Id of the request under the cursor."""
        table = self._table("requests")
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    async def action_cancel(self) -> None:
        """Cancel the request under the cursor.

        Cancellation:
            The request may be cancelled or not.
        """
        if (id_ := self.selected) is not None:
            self.notify(await self._viewer.cancel(id_), title=id_, markup=False)

    async def action_holders(self) -> None:
        """Show what holds the bytes of the request under the cursor.

        Cancellation:
            At any time.
        """
        if (id_ := self.selected) is not None:
            found = holder_lines(await self._viewer.holders(id_))
            holders = self.query_one("#holders", Static)
            holders.update(Text(f"{id_} ", "bold").append_text(found))
            holders.display = True

    def action_close(self) -> None:
        """Hide what holds bytes."""
        self.query_one("#holders", Static).display = False


def run(url: str, *, key: str | None = None, cacert: Path | None = None) -> None:
    """Run the application until the user quits.

    Args:
        url: As of `Viewer`.
        key: As of `Viewer`.
        cacert: As of `Viewer`.

    Raises:
        SystemExit: There is no terminal; the status is 2.
    """
    # textual reads keys from the one and draws on the other, and waits for ever, unless
    # another driver of its does, such as that of `textual serve`.
    drawn_on = sys.__stdout__ if sys.platform == "win32" else sys.__stderr__
    terminal = all(it and it.isatty() for it in (sys.__stdin__, drawn_on))
    if not terminal and "TEXTUAL_DRIVER" not in os.environ:
        words = "lifecycle top needs a terminal as standard input and standard error"
        if sys.stderr is not None:
            sys.stderr.write(f"{words}; without one, read /_lifecycle in a browser\n")
        raise SystemExit(2)
    Top(Viewer(url, key=key, cacert=cacert)).run()
