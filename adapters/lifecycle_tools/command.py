"""``lifecycle``: tools for servers of any kind, with one subcommand each."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

try:
    import typer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle needs {error.name}; pip install "anyio-lifecycle[tools]"',
        name=error.name,
    ) from None

app = typer.Typer(
    name="lifecycle",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Tools for the lifecycle of requests, in front of servers of any kind.",
)


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


@app.command()
def top(
    url: Annotated[
        str,
        typer.Argument(
            help="Address of the live view, as http://127.0.0.1:18000 or unix:PATH."
        ),
    ] = "http://127.0.0.1:18000",
    key: Annotated[
        str | None,
        typer.Option(
            "--admin-key",
            "--key",
            envvar="LIFECYCLE_ACCESS_ADMIN_KEY",
            help="The server's admin key.",
        ),
    ] = None,
    cacert: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="PEM file of an HTTPS server's authority."
        ),
    ] = None,
) -> None:
    """Show the live requests, gates and warnings of a running server.

    `lifecycle serve` prints the address of its live view; the default is that of its
    default port. Other servers need lifecycle_asgi.LiveView around their application.
    """
    from lifecycle_tools.top import run

    run(url, key=key, cacert=cacert)


# A subcommand reads its arguments itself, so that its modules are imported only then.
_PASS_ON: Final = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command("serve", context_settings=_PASS_ON, add_help_option=False)
def serve(ctx: typer.Context) -> None:
    """Serve a model with the bundled engine, over the OpenAI and Anthropic APIs."""
    _run_engine("serve", ctx.args)


@app.command("doctor", context_settings=_PASS_ON, add_help_option=False)
def doctor(ctx: typer.Context) -> None:
    """Check this machine: what stops the bundled engine, what could be better."""
    _run_engine("doctor", ctx.args)


def _run_engine(command: str, arguments: list[str]) -> None:
    from lifecycle_engine.cli import main as run

    run([command, *arguments], name="lifecycle")


@app.command("proxy", context_settings=_PASS_ON, add_help_option=False)
def proxy(ctx: typer.Context) -> None:
    """Admit requests in front of a server of any kind, and end what clients leave."""
    from lifecycle_tools.proxy.command import run

    run(ctx.args)


@app.command("check", context_settings=_PASS_ON, add_help_option=False)
def check(ctx: typer.Context) -> None:
    """Leave, attack and overload a server, and report in a table what it does."""
    from lifecycle_tools.check.command import run

    run(ctx.args)


@app.command("check-compare", context_settings=_PASS_ON, add_help_option=False)
def check_compare(ctx: typer.Context) -> None:
    """Print several reports of `lifecycle check` as one Markdown table."""
    from lifecycle_tools.check.command import run_compare

    run_compare(ctx.args)
