"""The subcommands ``check`` and ``check-compare``."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import anyio
import typer
from rich.console import Console
from rich.table import Table

from lifecycle_asgi.limits import is_loopback
from lifecycle_tools.check.client import Address
from lifecycle_tools.check.report import Report, compare, markdown
from lifecycle_tools.check.suite import NEIGHBOURS, checks, run as run_checks
from lifecycle_tools.check.target import CannotCheck, Settings, Target


def check(
    url: Annotated[str, typer.Argument(help="The server: http://127.0.0.1:8000")],
    *,
    model: Annotated[str, typer.Option(help="The model to ask for.")] = "default",
    api: Annotated[Literal["chat", "messages"], typer.Option()] = "chat",
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME: VALUE")] = None,
    pid: Annotated[int | None, typer.Option(help="The server's process.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Wait per answer.")] = 15.0,
    concurrency: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    clients: Annotated[int, typer.Option(min=1, max=64)] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Of a long request.")] = 512,
    turns: Annotated[int, typer.Option(min=1, help="Of staying and leaving.")] = 3,
    body: Annotated[str, typer.Option(help="More fields, as JSON.")] = "{}",
    gauge: Annotated[str | None, typer.Option(help="Name on /metrics.")] = None,
    metrics: Annotated[str | None, typer.Option(help="URL of /metrics.")] = None,
    image: Annotated[bool, typer.Option(help="Send pictures.")] = True,
    only: Annotated[list[str] | None, typer.Option(help="Names begin so.")] = None,
    neighbours: Annotated[
        bool, typer.Option("--neighbours", help="How one client affects another.")
    ] = False,
    neighbour_key: Annotated[
        str | None, typer.Option(help="The key of that other client.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown")] = None,
    label: Annotated[str | None, typer.Option(help="Name in reports.")] = None,
    i_may_test_this_server: Annotated[
        bool, typer.Option("--i-may-test-this-server", help="For other hosts.")
    ] = False,
) -> None:
    """Leave, attack and overload a server, and report in a table what it does.

    Exit status: 0 no check failed, 1 a check failed, 2 the checks could not run.
    """
    headers = [_header(text) for text in header or ()]
    if api_key:
        headers.append(("Authorization", f"Bearer {api_key}"))
    address = _address(url, tuple(headers), anywhere=i_may_test_this_server)
    settings = Settings(
        model=model,
        api=api,
        seconds=seconds,
        concurrency=concurrency,
        clients=clients,
        tokens=tokens,
        turns=turns,
        image=image,
        more=_fields(body),
        gauge=gauge,
        metrics=_elsewhere(metrics, anywhere=i_may_test_this_server),
        neighbour_key=neighbour_key,
    )
    names = _names(only or (), neighbours=neighbours)
    target = _target(address, settings, pid)
    report = _report(target, names, url, label or url)
    _show(report)
    _write(report, json_file, markdown_file)
    raise typer.Exit(1 if report.failed else 0)


def _target(address: Address, settings: Settings, pid: int | None) -> Target:
    try:
        return Target(address, settings, pid=pid)
    except (ImportError, ProcessLookupError) as error:
        raise typer.BadParameter(str(error)) from None


def _names(only: Sequence[str], *, neighbours: bool) -> tuple[str, ...]:
    if not neighbours:
        return tuple(only)
    begin = f"{NEIGHBOURS}."
    return tuple(begin + each.removeprefix(begin) for each in only) or (begin,)


def _report(target: Target, names: tuple[str, ...], url: str, label: str) -> Report:
    try:
        return anyio.run(_run, target, names, label)
    except CannotCheck as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(2) from None


def check_compare(files: list[Path]) -> None:
    """Print several JSON reports as one Markdown table."""
    try:
        typer.echo(compare([Report.read(path) for path in files]), nl=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def _address(
    url: str, headers: tuple[tuple[str, str], ...], *, anywhere: bool
) -> Address:
    try:
        address = Address.parse(url, headers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not is_loopback(address.host) and not anywhere:
        raise typer.BadParameter(
            f"{address.host} is not this host; the checks load a server, so add "
            "--i-may-test-this-server if you may do that"
        )
    return address


def _elsewhere(url: str | None, *, anywhere: bool) -> Address | None:
    return None if url is None else _address(url, (), anywhere=anywhere)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or "\n" in text or "\r" in text:
        raise typer.BadParameter("--header is written as 'NAME: VALUE', on one line")
    return name.strip(), value.strip()


def _fields(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise typer.BadParameter("--body takes a JSON object, as '{\"seed\": 1}'")
    return fields


async def _run(target: Target, only: tuple[str, ...], label: str) -> Report:
    settings = target.settings
    names = [name for name, _ in checks(settings, only)]
    if not names:
        raise typer.BadParameter("no check has a name that begins so")
    await target.measure_idle()
    typer.echo(
        f"{len(names)} checks: at most {settings.concurrency} requests at once, "
        f"{settings.tokens} tokens each, and one body of 192 MiB."
        if NEIGHBOURS not in names[0]
        else f"{len(names)} checks, in each of which one client takes all it can get.",
        err=True,
    )

    def show(name: str) -> None:
        typer.echo(f"{names.index(name) + 1}/{len(names)} {name}", err=True)

    findings = await run_checks(target, only=only, progress=show)
    return Report(
        server=label,
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        version=version("anyio-lifecycle"),
        settings={
            "api": settings.api,
            "seconds": settings.seconds,
            "concurrency": settings.concurrency,
            "clients": settings.clients,
            "tokens": settings.tokens,
            "turns": settings.turns,
            "body": dict(settings.more),
            "pid": target.process is not None,
            "idle_latency": round(target.idle.latency, 3),
        },
        findings=findings,
    )


def _show(report: Report) -> None:
    table = Table("check", "seen", "verdict", "because", title=report.server)
    colours = {"pass": "green", "fail": "red", "not observable": "yellow"}
    for found in report.findings:
        verdict = f"[{colours[found.verdict]}]{found.verdict}[/]"
        table.add_row(found.id, found.seen, verdict, found.because)
    Console().print(table)


def _write(report: Report, as_json: Path | None, as_markdown: Path | None) -> None:
    if as_json:
        as_json.write_text(report.to_json())
    if as_markdown:
        as_markdown.write_text(markdown(report))


def run(arguments: Sequence[str]) -> None:
    """Run ``lifecycle check`` with *arguments*."""
    _run_as(check, "check", arguments)


def run_compare(arguments: Sequence[str]) -> None:
    """Run ``lifecycle check-compare`` with *arguments*."""
    _run_as(check_compare, "check-compare", arguments)


def _run_as(function: Callable[..., None], name: str, arguments: Sequence[str]) -> None:
    command = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    command.command()(function)
    command(list(arguments), prog_name=f"lifecycle {name}")
