"""``lifecycle-engine``: run the server, and check the machine it runs on."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle-engine needs {error.name}; pip install "anyio-lifecycle[engine]"',
        name=error.name,
    ) from None

from lifecycle_engine.config import (
    CONFIG_VARIABLE,
    SETTINGS,
    ConfigError,
    ServerConfig,
    Setting,
    load_config,
    unknown_variables,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from lifecycle_engine.server.service import Service

PANELS = {
    "model": "Model",
    "admission": "Admission control",
    "access": "Access control",
    "http": "HTTP server",
    "engine": "Engine",
}
"""Headings of ``serve --help`` by section of the configuration."""

# Tells a command that its process runs nothing else.
_OWN_PROCESS = object()


class _Help:
    """Shows ``--help`` without the type of its value, which it does not take."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class _Command(_Help, TyperCommand):
    pass


class _Group(_Help, TyperGroup):
    pass


cli = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="A vision-language model server with a lifecycle for every request.",
)


def _parameter(setting: Setting) -> inspect.Parameter:
    """Return the option of a setting, as a parameter that typer reads."""
    kind: Any = list[str] | None if setting.many else str | None
    option, default = setting.option, setting.shown_default
    if setting.kind is bool:
        kind = bool | None
        option = f"{option}/--no-{option.removeprefix('--')}"
    declared = typer.Option(
        option,
        help=setting.help + (f" Default: {default}." if default else ""),
        metavar=setting.form.metavar,
        rich_help_panel=PANELS[setting.section],
        show_default=False,
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, declared],
    )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give *command* an option for each setting, in place of its ``**options``.

    The settings are declared once, in `config`; typer reads a signature.
    """
    own = inspect.signature(command, eval_str=True)
    parameters = [
        parameter
        for parameter in own.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters += [_parameter(setting) for setting in SETTINGS]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@cli.command(cls=_Command)
@_with_settings
def serve(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of the model's checkpoint, as --checkpoint.",
            metavar="CHECKPOINT",
            show_default=False,
        ),
    ] = None,
    *,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar=CONFIG_VARIABLE,
            help="TOML file with the settings below.",
            metavar="FILE",
        ),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the settings of all sources as TOML.",
            metavar="",
        ),
    ] = False,
    hints: Annotated[
        bool,
        typer.Option(
            "--hints", help="Print example requests at the start.", metavar=""
        ),
    ] = False,
    **options: Any,
) -> None:
    """Serve the OpenAI and Anthropic APIs until SIGTERM or SIGINT.

    Every option below can also be set in the environment (--max-waiting is
    LIFECYCLE_MAX_WAITING) or in a TOML file. An option overrides the
    environment, and the environment overrides the file.

    Try it without a model: `lifecycle serve --runner sim --hints`.
    """
    with _reporting_settings():
        if folder is not None:
            if options["model_checkpoint"] is not None:
                raise ConfigError("CHECKPOINT", "--checkpoint names one, too; name one")
            options["model_checkpoint"] = str(folder)
        config = _load(config_file, options)
        if print_config:
            typer.echo(config.to_toml(), nl=False)
            return
        from lifecycle_engine import factory

        if context.obj is _OWN_PROCESS:
            factory.leave_torch_to_the_engine(config)
        app = factory.make_app(config)
        _warn_if_open(config)
    _run(app, config, hints=hints)


def _load(file: Path | None, options: Mapping[str, Any]) -> ServerConfig:
    # typer passes an empty list for an option that may be repeated and was not given.
    given = {name: value for name, value in options.items() if value != []}
    for sentence in unknown_variables(os.environ):
        typer.echo(f"warning: {sentence}", err=True)
    try:
        config = load_config(given, environment=os.environ, file=file)
    except OSError as error:
        named = os.environ.get(CONFIG_VARIABLE) == str(file)
        raise ConfigError(
            CONFIG_VARIABLE if named else "--config",
            f"{file} cannot be read: {error.strerror}; name a TOML file",
        ) from None
    for setting in SETTINGS:
        if setting.form.secret:
            os.environ.pop(setting.variable, None)  # the engine inherits the rest
    return config


def _warn_if_open(config: ServerConfig) -> None:
    """Say that other machines may reach a server that asks them for no key."""
    from lifecycle_asgi.limits import is_loopback

    host, access = config.http.host, config.access
    if not (access.api_keys or access.api_key_file or is_loopback(host)):
        typer.echo(
            f"warning: {host} may be reached from other machines, and no key is asked "
            f"for; give --api-key-file FILE, or --host 127.0.0.1",
            err=True,
        )


def _run(app: Starlette, config: ServerConfig, *, hints: bool) -> None:
    from lifecycle_asgi.memory_limit import default_budget, explain
    from lifecycle_engine.factory import model_name
    from lifecycle_engine.server import run as server
    from lifecycle_engine.server.uvicorn_protocol import ConnectionLimits

    def announce(address: str, operator: str | None = None) -> None:
        typer.echo(f"lifecycle-engine is ready at {address}")
        if operator is not None:
            taken = _taken_port(config, operator)
            where = f"port {taken} is taken; " if taken else ""
            typer.echo(f"{where}see what it does: lifecycle top {operator}")
        typer.echo(explain(config.admission.bytes or default_budget()))
        if hints:
            keyed = bool(config.access.api_keys or config.access.api_key_file)
            typer.echo(first_steps(address, model_name(config.model), keyed=keyed))
        sys.stdout.flush()

    http = config.http
    with reporting_failures(app.state.service, config):
        server.run(
            app,
            host=http.host,
            port=http.port,
            drain=http.drain,
            limits=ConnectionLimits(
                head=http.header_timeout,
                reader=http.send_timeout,
                connections=http.max_connections,
                half_closed=http.half_closed,
            ),
            proxies=http.proxies,
            certificate=http.ssl_certfile,
            key=http.ssl_keyfile,
            announce=announce,
            operator=http.operator_address,
            operator_moves=http.admin_listen is None,
            signals_after=signal.SIG_IGN,
        )


def _taken_port(config: ServerConfig, operator: str) -> int | None:
    """Return the port that the operator's pages at *operator* were to have."""
    wanted = config.http.operator_address
    if not isinstance(wanted, tuple) or operator.endswith(f":{wanted[1]}"):
        return None
    return wanted[1] or None


def first_steps(address: str, model: str, *, keyed: bool) -> str:
    """Return a curl line and a Python snippet: with a key of yours, where *keyed*."""
    key = "YOUR_KEY" if keyed else "none is needed"
    header = f"-H 'authorization: Bearer {key}' \\\n    " if keyed else ""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say something"}],
        "max_tokens": 20,
    }
    return f"""
Try it with curl:

  curl -sN {address}/v1/chat/completions \\
    {header}-H 'content-type: application/json' \\
    -d '{json.dumps({**body, "stream": True})}'

or with the OpenAI SDK:

  from openai import OpenAI

  client = OpenAI(base_url="{address}/v1", api_key="{key}")
  answer = client.chat.completions.create(
      model="{model}",
      messages=[{{"role": "user", "content": "Say something"}}],
      max_tokens=20,
  )
  print(answer.choices[0].message.content)

Stop it with Ctrl-C: streams get time to finish."""


@contextmanager
def _reporting_settings() -> Iterator[None]:
    """Exit with a sentence where a setting or the checkpoint is wrong."""
    from lifecycle_engine.factory import CheckpointError

    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(error.problem, param_hint=error.source) from None
    except CheckpointError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@contextmanager
def reporting_failures(service: Service, config: ServerConfig) -> Iterator[None]:
    """Exit with a sentence where the server does not start."""
    from lifecycle import EngineLost

    def unreported(record: logging.LogRecord) -> bool:
        del record
        return service.failure is None

    log = logging.getLogger("uvicorn.error")
    log.addFilter(unreported)  # it logs a traceback where a sentence is printed below
    message = ""
    try:
        yield
    except OSError as error:
        host, port = config.source_of("http.host"), config.source_of("http.port")
        message = (
            f"cannot listen on {config.http.host} ({host}) port {config.http.port} "
            f"({port}): {error.strerror or error}; choose another port, 0 for a free "
            f"one, or another host"
        )
        if error.errno == errno.EMFILE:  # of anything that starts
            message = f"cannot start: {error.strerror}; raise the limit (ulimit -n)"
        elif error.filename is not None:  # of the operator's listener
            admin = config.source_of("http.admin_listen")
            message = (
                f"cannot listen on {error.filename} ({admin}) for the operator: "
                f"{error.strerror}; give another address, or off"
            )
    except EngineLost as error:
        message = f"the engine did not start: {error}"
    except SystemExit:  # of uvicorn, where the application did not start
        if service.failure is None:
            raise
        message = f"the engine did not start: {service.failure}"
    finally:
        log.removeFilter(unreported)
    if message:
        typer.echo(message, err=True)
        raise typer.Exit(1)


@cli.command(cls=_Command)
def doctor(
    *,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder; shows the memory of its KV cache slots."),
    ] = None,
    kv_slots: Annotated[
        int, typer.Option(help="KV cache slots, as of serve.", min=1)
    ] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer, as of serve.", min=2),
    ] = None,
) -> None:
    """Check this machine: what stops the server, what could be better, what to do."""
    from lifecycle_engine.doctor import examine
    from lifecycle_engine.factory import require_checkpoint

    with _reporting_settings():
        if checkpoint is not None:
            require_checkpoint(checkpoint, "--checkpoint")
    marks = {"fine": "  ok", "note": "note", "bad": " BAD"}
    bad = 0
    for finding in examine(checkpoint, slots=kv_slots, max_length=max_length):
        typer.echo(f"{marks[finding.state]}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"      -> {finding.remedy}")
        bad += finding.state == "bad"
    raise typer.Exit(1 if bad else 0)


def main(arguments: Sequence[str] | None = None, *, name: str | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Those after the name of the command; default: of this process.
        name: The command as help and errors call it; default: as it was started.
    """
    # Until the server has handlers of its own, Ctrl-C kills. Python would raise it in
    # what runs just then, and from a callback of a weak reference it would be lost.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_closed_streams()
    try:
        cli(arguments, prog_name=name, obj=_OWN_PROCESS)
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


def _open_closed_streams() -> None:
    """Give a process that was started without them the standard streams.

    uvicorn asks them whether they are terminals; and a socket would get the number of
    one, to which a C library may write.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the lowest free number is then its own
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
