"""The commands of ``lifecycle-engine`` beside ``serve``."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .launch import RunnerName, SamplingDefaults, default_checkpoint, make_processor

if TYPE_CHECKING:
    from lifecycle.events import Observer

    from .defaults import ChatDefaults
    from .processor import Empty, Processor
    from .service import Service


def tiny() -> Path:
    """The tiny checkpoint, or an end that says why there is none."""
    try:
        return default_checkpoint()
    except OSError as error:
        remedy = "name one with --checkpoint, or use --runner sim"
        typer.echo(f"no tiny checkpoint: {error}; {remedy}", err=True)
        raise typer.Exit(1) from None


def existing(folder: Path) -> Path:
    """The folder of a checkpoint, or an end that says how to get one."""
    if (folder / "config.json").exists():
        return folder
    raise typer.BadParameter(
        f"{folder} holds no config.json; "
        f"`lifecycle-engine checkpoint {folder}` builds a tiny checkpoint there",
        param_hint="--checkpoint",
    )


def processor_of(folder: Path | None, empty: Empty | None) -> Processor:
    """The processor of a checkpoint, or an end that says why there is none."""
    with _served(folder):
        return make_processor(folder, empty)


def defaults_of(folder: Path | None, whose: SamplingDefaults) -> ChatDefaults:
    """What requests get that do not say, or an end that says what is wrong with it."""
    from . import defaults

    if folder is None or whose is SamplingDefaults.openai:
        return defaults.ChatDefaults()
    with _served(folder):
        return defaults.defaults_of(folder)


@contextmanager
def _served(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        # Only the first line: transformers goes on with advice about its hub.
        first = str(error).strip().partition("\n")[0]
        typer.echo(f"{folder} cannot be served: {first}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def failures_told(service: Service, host: str, port: int) -> Iterator[None]:
    """Tell in a line why a server does not start, and end."""
    from lifecycle import EngineLost

    def untold(record: logging.LogRecord) -> bool:
        del record
        return service.failure is None

    log = logging.getLogger("uvicorn.error")
    log.addFilter(untold)  # it has the whole traceback for what a sentence tells
    why = ""
    try:
        yield
    except OSError as error:
        why = f"cannot listen on {host} port {port}: {error.strerror or error}; "
        why += "choose another --port, 0 for a free one, or another --host"
    except EngineLost as error:
        why = f"the engine did not start: {error}"
    except SystemExit:  # of newer uvicorn, where the application did not start
        if service.failure is None:
            raise
    finally:
        log.removeFilter(untold)
    if service.failure is not None:  # older uvicorn returns as if all were well
        why = f"the engine did not start: {service.failure}"
    if why:
        typer.echo(why, err=True)
        raise typer.Exit(1)


def enough(kv_slots: int | None, max_batch: int) -> int | None:
    """The slots as given, or an end that says why they are too few."""
    if kv_slots is None or kv_slots >= max_batch:
        return kv_slots
    raise typer.BadParameter(
        f"{kv_slots} cannot hold a batch of {max_batch}; give more, or a smaller "
        f"--max-batch",
        param_hint="--kv-slots",
    )


def observers(names: Sequence[str]) -> Sequence[Observer]:
    """The functions of these names, or an end that says which is none."""
    found = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            each = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise typer.BadParameter(
                f"{name}: {error}; give MODULE:NAME, of a module on PYTHONPATH",
                param_hint="--observer",
            ) from None
        if not callable(each) or _is_async(each):
            what = "async" if callable(each) else f"a {type(each).__name__}"
            raise typer.BadParameter(
                f"{name} is {what}, not a function of an event that returns at once",
                param_hint="--observer",
            )
        found.append(each)
    return found


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether what a call returns would have to be awaited, which nobody does."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    made = type(function).__call__  # of an object that can be called
    return any(kind(each) for kind in kinds for each in (function, made))


def networks(proxies: Sequence[str]) -> Sequence[str]:
    """Addresses and networks of proxies, or an end that says which is none."""
    for each in proxies:
        try:
            ip_network(each)
        except ValueError as error:
            # Taken for a name it would never be anybody's, and its clients all be one.
            raise typer.BadParameter(f"{error}", param_hint="--proxy") from None
    return proxies


def demo(
    *,
    runner: Annotated[
        RunnerName, typer.Option(help="torch runs a model, sim needs no torch.")
    ] = RunnerName.torch,
    clients: Annotated[int, typer.Option(help="How many ask at a time.")] = 32,
    requests: Annotated[int, typer.Option(help="How many they send in all.")] = 160,
    seed: Annotated[int, typer.Option(help="Draws their pictures and manners.")] = 1,
) -> None:
    """Run a server under unreliable clients, kill its engine, look what is left."""
    import anyio

    try:
        from .demo.run import run
        from .demo.server import ServerFailed
    except ModuleNotFoundError as error:
        typer.echo(f"{error}; pip install 'anyio-lifecycle[demo]'", err=True)
        raise typer.Exit(2) from None
    if runner is RunnerName.torch:
        tiny()  # built once, and not while the server is waited for
    # Less than the clients bring, so that the gates have something to do.
    arguments = ["--runner", runner.value, "--slots", "24", "--payload-bytes"]
    arguments.append(str(512 * 2**20))

    async def main() -> int:
        return await run(
            arguments=arguments, clients=clients, requests=requests, seed=seed
        )

    try:
        status = anyio.run(main)
    except ServerFailed as error:
        typer.echo(f"demo: {error}", err=True)
        status = 1
    raise typer.Exit(status)


def bench(
    *,
    url: Annotated[
        str | None,
        typer.Option(help="A running server, without a path; else one of its own."),
    ] = None,
    requests: Annotated[int, typer.Option(help="How many in all.", min=1)] = 200,
    clients: Annotated[int, typer.Option(help="How many at a time.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens an answer.", min=1)] = 32,
) -> None:
    """Load a server a little: throughput, time to the first token, refusals."""
    import anyio

    try:
        import openai

        from . import load
        from .demo.server import ServerFailed, running
    except ModuleNotFoundError as error:
        typer.echo(f"{error}; pip install 'anyio-lifecycle[demo]'", err=True)
        raise typer.Exit(2) from None

    async def measure(url: str) -> load.Load:
        with typer.progressbar(
            length=requests, label=f"{clients} clients", file=sys.stderr
        ) as bar:
            return await load.run(
                url,
                requests=requests,
                clients=clients,
                tokens=tokens,
                advance=lambda: bar.update(1),
            )

    async def main() -> load.Load:
        if url is not None:
            return await measure(url.rstrip("/"))
        async with running(["--runner", "sim"]) as server:
            await server.wait_ready()
            return await measure(server.url)

    try:
        result = anyio.run(main)
    except ServerFailed as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(1) from None
    except openai.APIError as error:
        remedy = f"is a server running at {url}? Name it without a path"
        typer.echo(f"bench: {str(error).rstrip('.')}; {remedy}", err=True)
        raise typer.Exit(1) from None
    typer.echo("\n".join(result.lines()))


def checkpoint(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    family: Annotated[
        str, typer.Option(help="qwen2_5_vl, qwen3_vl, llava, llama or qwen3.")
    ] = "qwen2_5_vl",
    seed: Annotated[int, typer.Option(help="Draws the random weights.")] = 0,
) -> None:
    """Build a tiny random checkpoint, offline."""
    from .models.checkpoint import build

    try:
        build(out, family, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        typer.echo(f"{out} cannot be written: {error}; name another folder", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{out}")


def doctor(
    *,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A checkpoint, to tell what its KV slots take of memory."),
    ] = None,
    kv_slots: Annotated[int, typer.Option(help="As of serve.", min=1)] = 8,
    max_length: Annotated[int | None, typer.Option(help="As of serve.", min=2)] = None,
) -> None:
    """Say what is wrong with this machine, or could be better, and what to do."""
    from .doctor import examine

    checkpoint = existing(checkpoint) if checkpoint else None
    marks = {"fine": "  ok", "note": "note", "bad": " BAD"}
    bad = 0
    for finding in examine(checkpoint, slots=kv_slots, max_length=max_length):
        typer.echo(f"{marks[finding.state]}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"      -> {finding.remedy}")
        bad += finding.state == "bad"
    raise typer.Exit(1 if bad else 0)
