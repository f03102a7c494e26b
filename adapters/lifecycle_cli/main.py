"""``lifecycle``: tools for servers of any kind, with one subcommand each."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle needs {error.name}; pip install "anyio-lifecycle[cli]"',
        name=error.name,
    ) from None

from lifecycle_check.cli import check, check_compare

app = typer.Typer(
    name="lifecycle",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Tools for the lifecycle of requests, in front of servers of any kind.",
)


app.command("check")(check)
app.command("check-compare")(check_compare)


def _show_version(value: bool) -> None:  # noqa: FBT001 - typer passes it so
    if value:
        typer.echo(version("anyio-lifecycle"))
        raise typer.Exit


@app.callback()
def root(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Keep the subcommands apart."""


def main() -> None:
    """Run the command."""
    app()
