"""``lifecycle-engine``: run the server, and what helps with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle-engine needs {error.name}; pip install "anyio-lifecycle[engine]"',
        name=error.name,
    ) from None

from . import commands
from .launch import (
    Device,
    EngineOn,
    RunnerName,
    SamplingDefaults,
    on_ray,
    worker_argv,
)
from .routes.hints import first_steps
from .routes.observing import LogName, log_of, spans_of, together

if TYPE_CHECKING:
    from lifecycle.events import Observer
    from lifecycle_metrics import Metrics

cli = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="A vision-language model server with a lifecycle for every request.",
)


@cli.command()
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    runner: Annotated[
        RunnerName, typer.Option(help="torch runs a checkpoint; sim makes up words.")
    ] = RunnerName.torch,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder; a tiny random one if left out."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where torch computes.")] = Device.cpu,
    engine_on: Annotated[
        EngineOn, typer.Option("--engine", help="A process here, or Ray actors.")
    ] = EngineOn.process,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster; one of its own if left out."),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Engines on Ray.", min=1)] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of each engine on Ray; 1 on cuda.", min=0),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name that clients ask for; the folder's if left out."),
    ] = None,
    sampling_defaults: Annotated[
        SamplingDefaults,
        typer.Option(help="How silent requests draw: as model or OpenAI has it."),
    ] = SamplingDefaults.model,
    payload_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of pictures at a time; as many as --arena-bytes if left out.",
            min=1,
        ),
    ] = None,
    arena_bytes: Annotated[
        int,
        typer.Option(
            help="Bytes of memory that an engine on this machine reads payloads in; "
            "0 sends them.",
            min=0,
        ),
    ] = 2 * 2**30,
    slots: Annotated[
        int,
        typer.Option(help="Requests that may be in flight; 0 is unbounded.", min=0),
    ] = 256,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait at each gate.", min=0)
    ] = 1024,
    max_wait: Annotated[
        float, typer.Option(help="Seconds that a request may wait at a gate.", min=0)
    ] = 60.0,
    per_client: Annotated[
        int,
        typer.Option(help="Requests of one client at a time; 0 is unbounded.", min=0),
    ] = 0,
    client_keys: Annotated[
        typer.FileText | None,
        typer.Option(
            help="A file of API keys, one a line: each is a client, whatever its "
            "address. Other clients are told by their address."
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            help="Address or network of a proxy whose X-Forwarded-For is believed; "
            "may be repeated."
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Requests in one step.", min=1)] = 8,
    kv_slots: Annotated[
        int | None,
        typer.Option(
            help="Requests whose KV is held, those in a step and conversations that "
            "rest between two turns (prompt_cache_key); each takes the memory of "
            "--max-length tokens. As many as --max-batch if left out: set it higher "
            "where many talk in turns.",
            min=1,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer together; as many as the model takes, "
            "up to 8192, if left out.",
            min=1,
        ),
    ] = None,
    chunk: Annotated[
        int, typer.Option(help="Prompt tokens that are read in one step.", min=1)
    ] = 512,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of the weights; the checkpoint's own on cuda, else float32."
        ),
    ] = None,
    body_bytes: Annotated[
        int, typer.Option(help="The largest request body.", min=1)
    ] = 64 * 2**20,
    body_patience: Annotated[
        float,
        typer.Option(
            help="Seconds that a body may take while others wait for its room.", min=0
        ),
    ] = 30.0,
    threads: Annotated[
        int, typer.Option(help="Requests that are prepared at a time.", min=1)
    ] = 2,
    stalled_after: Annotated[
        float, typer.Option(help="Seconds that one step of the engine may take.", min=1)
    ] = 30.0,
    max_connections: Annotated[
        int, typer.Option(help="Connections at a time; others get 503.", min=1)
    ] = 16384,
    remote_images: Annotated[
        bool,
        typer.Option(
            "--remote-images",
            help="Fetch images that requests name by https, from public addresses.",
        ),
    ] = False,
    drain: Annotated[
        float, typer.Option(help="Seconds that streams get after SIGTERM.", min=0)
    ] = 10.0,
    log: Annotated[
        LogName, typer.Option(help="failures alone, or a line for each request.")
    ] = LogName.failures,
    observer: Annotated[
        list[str] | None,
        typer.Option(help="MODULE:NAME of a function that is told of every event."),
    ] = None,
    hints: Annotated[
        bool, typer.Option("--hints", help="Print what to try once it is ready.")
    ] = False,
) -> None:
    """Serve the APIs of OpenAI and Anthropic until SIGTERM or SIGINT.

    To try it: `lifecycle-engine serve --hints`, which prints what to ask it.
    """
    from lifecycle import Gate
    from lifecycle_asgi import KnownKeys, client_address
    from lifecycle_zmq import ZmqEngine

    from .app import AppSettings, create_app
    from .http import serve as server
    from .http.connections import ConnectionLimits
    from .http.https_get import FetchLimits, HttpsGet
    from .processor import in_arena, room
    from .service import Engine

    folder, believed = None, commands.networks(proxy or ())
    if runner is RunnerName.torch:
        folder = commands.existing(checkpoint) if checkpoint else commands.tiny()
    argv = worker_argv(
        runner,
        folder,
        device=device,
        max_batch=max_batch,
        kv_slots=commands.enough(kv_slots, max_batch),
        max_length=max_length,
        chunk=chunk,
        dtype=dtype,
    )
    engine: Engine
    empty, capacity = None, room(payload_bytes, 0)
    if engine_on is EngineOn.ray:
        engine = on_ray(
            argv,
            address=ray_address,
            replicas=replicas,
            gpus=float(device is Device.cuda) if gpus is None else gpus,
            stalled_after=stalled_after,
        )
    else:
        engine = local = ZmqEngine(
            argv,
            stalled_after=stalled_after,
            stop_timeout=1.0,  # clients are gone by then, and it has nothing to save
            arena_bytes=arena_bytes,
        )
        empty = in_arena(local) if arena_bytes else None
        capacity = room(payload_bytes, arena_bytes)
    clients = KnownKeys(client_keys.read().split()) if client_keys else client_address
    name = model or (folder.name if folder is not None else "sim")
    line: dict[str, Any] = {"max_waiting": max_waiting, "max_wait": max_wait}
    metrics = _metrics()
    told: Observer | None = metrics
    if observer:
        told = together(metrics, *commands.observers(observer))
    line |= {"observer": told}
    app = create_app(
        engine,
        commands.processor_of(folder, empty),
        gate=Gate(bytes=capacity, name="payloads", **line),
        in_flight=Gate(slots=slots or None, name="in_flight", **line),
        bodies=Gate(bytes=8 * body_bytes, name="bodies", **line),
        observer=told,
        metrics=metrics,
        log=together(log_of(log), spans_of(name)),
        settings=AppSettings(
            model=name,
            body_bytes=body_bytes,
            body_patience=body_patience,
            threads=threads,
            defaults=commands.defaults_of(folder, sampling_defaults),
            per_client=per_client or None,
            client=clients,
            fetch=HttpsGet(FetchLimits()) if remote_images else None,
        ),
    )

    def announce(address: str) -> None:
        typer.echo(f"lifecycle-engine is ready at {address}")
        if hints:
            typer.echo(first_steps(address, name))
        sys.stdout.flush()

    with commands.failures_told(app.state.service, host, port):
        server.run(
            app,
            host=host,
            port=port,
            drain=drain,
            limits=ConnectionLimits(connections=max_connections),
            proxies=believed,
            announce=announce,
        )
    # All is done, and nothing left that a signal could cut short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


for _command in (commands.demo, commands.checkpoint, commands.bench, commands.doctor):
    cli.command()(_command)


def _metrics() -> Metrics | None:
    try:
        from lifecycle_metrics import Metrics
    except ImportError:  # the server runs without its extra
        return None
    return Metrics()


def main() -> None:
    """Run the command line."""
    try:
        cli()
    except ImportError as error:
        if error.name is not None and error.name.startswith("lifecycle"):
            raise
        words = str(error)
        if "install" not in words:
            words += '; pip install "anyio-lifecycle[engine]"'
        typer.echo(words, err=True)
        sys.exit(2)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        # As in the worker: by now everything has been closed in order.
        os._exit(end.code or 0)


if __name__ == "__main__":
    main()
