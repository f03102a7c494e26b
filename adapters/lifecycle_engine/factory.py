"""Makes the engine, its processor and the application of a `ServerConfig`."""

from __future__ import annotations

import errno
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import SETTINGS, ConfigError, ModelConfig, ServerConfig, misfit

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from lifecycle.events import Observer
    from lifecycle_asgi.prometheus import Metrics
    from lifecycle_engine.processing.processor import ChatDefaults, Empty, Processor
    from lifecycle_engine.server.app import AppSettings
    from lifecycle_engine.server.service import Engine
    from lifecycle_ray import RayEngine


# Keys whose options the engine process has, too.
_OF_THE_WORKER = (
    *("runner", "device", "dtype", "max_length", "max_batch", "chunk", "tp"),
    *("graphs", "buckets", "speculative", "draft_tokens"),
)
_MAX_ARENA = 2 * 2**30
# Of the simulated model, as of Qwen2-VL: 1,280 tokens of 28 x 28 pixels.
_SIM_PIXELS = 1280 * 28**2
# Pages of the arena that nothing uses are kept for this long, or twice as long.
_ARENA_IDLE = 2.5


class CheckpointError(ValueError):
    """A checkpoint that cannot be served."""


def make_app(config: ServerConfig) -> Starlette:
    """Make the application of a server; running it starts the engine.

    Args:
        config: All its settings.

    Raises:
        ConfigError: A setting names what is not there; with the source of its value.
        CheckpointError: The checkpoint cannot be served.
        ImportError: An extra is missing.
    """
    try:
        return _make_app(config)
    except ConfigError as error:
        raise ConfigError(config.source_of(error.source), error.problem) from None
    except CheckpointError as error:
        source = config.source_of("model.checkpoint")
        raise CheckpointError(f"{source}: {error}") from None


def _make_app(config: ServerConfig) -> Starlette:
    from lifecycle import Gate
    from lifecycle.events import combine_observers
    from lifecycle_asgi.lanes import RESERVES, shares
    from lifecycle_engine.events import request_logger, tracing_observer
    from lifecycle_engine.processing.processor import in_arena, payload_capacity
    from lifecycle_engine.server.app import create_app
    from lifecycle_zmq import ZmqEngine

    folder = checkpoint_of(config.model)
    _check_certificate(config)
    _check_operator(config)
    _check_engine(config)
    settings = _app_settings(config, folder)
    engine, arena_bytes = make_engine(config, folder), 0
    empty = None
    if isinstance(engine, ZmqEngine) and (arena_bytes := _arena_bytes(config)):
        empty = in_arena(engine)
    metrics = _metrics()
    observer: Observer | None = metrics
    if config.http.observers:
        observer = combine_observers(metrics, *observers(config.http.observers))
    gate = partial(
        Gate,
        max_waiting=config.admission.max_waiting,
        max_wait=config.admission.max_wait,
        order=config.admission.order,
        reserve=RESERVES[config.admission.order],
        observer=observer,
    )
    shadow = config.admission.shadow
    # Where nothing else is said, an arena that is given is what images may have.
    total = config.admission.bytes or (None if arena_bytes else settings.total_bytes)
    images = total and shares(total)[-1]
    return create_app(
        engine,
        make_processor(folder, empty, config.model.max_length),
        gate=gate(
            # In shadow, memory that the engine shares is a limit all the same: there is
            # no more of it.
            slots=None if shadow and arena_bytes else config.admission.media_slots,
            bytes=payload_capacity(images, arena_bytes),
            enforce=not shadow or bool(arena_bytes),
            name="payloads",
        ),
        in_flight=gate(
            slots=config.admission.slots or None, enforce=not shadow, name="in_flight"
        ),
        observer=observer,
        metrics=metrics,
        log=combine_observers(
            request_logger(config.http.log), tracing_observer(model_name(config.model))
        ),
        settings=settings,
    )


def model_name(config: ModelConfig) -> str:
    """The name that clients ask for."""
    torch, folder = config.runner == "torch", config.checkpoint
    return config.name or (folder.name if torch and folder else "sim")


def checkpoint_of(config: ModelConfig) -> Path | None:
    """The folder of the checkpoint; ``None`` for the simulated model.

    Raises:
        ConfigError: No folder is named, or it holds no checkpoint.
    """
    if config.runner == "sim":
        return None
    if config.checkpoint is None:
        raise ConfigError(
            "model.checkpoint",
            "the server needs a checkpoint folder; `hf download MODEL --local-dir "
            "FOLDER` gets one, and --runner sim simulates a model",
        )
    require_checkpoint(config.checkpoint)
    return config.checkpoint


def require_checkpoint(folder: Path, source: str = "model.checkpoint") -> None:
    """Check that a folder, whose name came from *source*, holds a checkpoint.

    Raises:
        ConfigError: It holds none.
    """
    if (folder / "config.json").exists():
        return
    raise ConfigError(
        source,
        f"{folder} holds no config.json; name the folder of a checkpoint "
        f"(`hf download MODEL --local-dir {folder}` gets one)",
    )


def make_engine(config: ServerConfig, folder: Path | None) -> Engine:
    """Make the engine, in a child process or on Ray; entering it starts it."""
    argv = worker_argv(config, folder)
    if config.engine.executor == "ray":
        return _on_ray(config, argv)
    from lifecycle_zmq import ZmqEngine

    return ZmqEngine(
        argv,
        stalled_after=config.engine.stalled_after,
        stop_timeout=1.0,  # clients are gone by then, and it has nothing to save
        arena_bytes=_arena_bytes(config),
        # A device has the arena pinned.
        arena_idle=_ARENA_IDLE if config.model.device == "cpu" else None,
    )


def _arena_bytes(config: ServerConfig) -> int:
    """The size of the arena: as set, or what images have of all bytes."""
    from lifecycle_asgi.lanes import shares
    from lifecycle_asgi.memory_limit import default_budget

    if config.engine.arena_bytes is not None:
        return config.engine.arena_bytes
    return min(_MAX_ARENA, shares(config.admission.bytes or default_budget())[-1])


def worker_argv(config: ServerConfig, folder: Path | None) -> list[str]:
    """The command line of the engine process."""
    argv = [sys.executable, "-m", "lifecycle_engine.worker"]
    if folder is not None:
        argv += ["--checkpoint", str(folder)]
    if config.engine.kv_slots is not None:
        argv += ["--slots", str(config.engine.kv_slots)]
    for setting in SETTINGS:
        value = getattr(getattr(config, setting.section), setting.key)
        if setting.key in _OF_THE_WORKER and value is not None:
            for each in value if setting.many else (value,):
                argv += [setting.option, str(each)]
    return argv


def _check_engine(config: ServerConfig) -> None:
    """Refuse settings of the engine that do not go with others."""
    engine, sim, parts = config.engine, config.model.runner == "sim", config.engine.tp
    cuda = config.model.device == "cuda" and not sim
    if parts > 1 and sim:
        raise misfit(engine, "tp", "has no effect with --runner sim; remove one")
    if parts > 1 and engine.executor == "ray":
        why = "needs an engine in a process; remove it, or --engine ray"
        raise misfit(engine, "tp", why)
    if parts > 1 and engine.graphs == "on":
        why = f"is for one process, and --tp is {parts}; remove one of them"
        raise misfit(engine, "graphs", why)
    if engine.graphs == "on" and not cuda:
        why = "CUDA graphs need --runner torch and --device cuda"
        give = "give both, or fake graphs, or none"
        raise ConfigError("engine.graphs", f"{why}; {give}")
    default = "on" if cuda and parts == 1 else "off"
    if engine.buckets and (engine.graphs or default) == "off":
        why = "has no effect without graphs; give --graphs as well, or remove it"
        raise misfit(engine, "buckets", why)
    if engine.speculative is not None and sim:
        why = "has no effect with --runner sim; remove one"
        raise misfit(engine, "speculative", why)
    drafts = engine.draft_tokens != type(engine)().draft_tokens
    if drafts and engine.speculative is None:
        why = "has no effect without drafts; give --speculative as well, or remove it"
        raise misfit(engine, "draft_tokens", why)


def _on_ray(config: ServerConfig, argv: Sequence[str]) -> RayEngine:
    from lifecycle_engine.worker import make_backend
    from lifecycle_ray import Placement, RayEngine

    gpus = config.engine.gpus
    if gpus is None:
        gpus = float(config.model.device == "cuda")
    _python, _m, _module, *arguments = argv
    return RayEngine(
        partial(make_backend, arguments),
        replicas=config.engine.replicas,
        placement=Placement(num_gpus=gpus),
        address=config.engine.ray_address,
        stalled_after=config.engine.stalled_after,
    )


def leave_torch_to_the_engine(config: ServerConfig) -> None:
    """Have transformers do without torch in this process, from now on.

    Unless there are observers, whose modules may need it.

    transformers imports torch wherever it is installed, and tokenizers and the
    processors of pictures need none of it: the larger part of the process's memory,
    for nothing. For a process whose engine is another one.
    """
    if config.http.observers:
        return
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as import takes it
    logging.getLogger("transformers").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


def make_processor(
    folder: Path | None, empty: Empty | None, max_length: int | None
) -> Processor:
    """The processor of a checkpoint; of the simulated model if there is none."""
    if folder is None:
        from lifecycle_engine.sim import SimProcessor

        return SimProcessor(tensor_pixels=_SIM_PIXELS, empty=empty)
    with _served(folder):  # importing may fail, too, as where a library is damaged
        from lifecycle_engine._compat import hf
        from lifecycle_engine.processing.chat_processor import ChatProcessor

        hf("set_verbosity_error", "utils.logging")()
        return ChatProcessor(folder, max_length=max_length, empty=empty)


@contextmanager
def _served(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        # Only the first line: transformers goes on with advice about its hub.
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder} cannot be served: {first}") from None


def _app_settings(config: ServerConfig, folder: Path | None) -> AppSettings:
    from lifecycle_asgi.memory_limit import default_budget
    from lifecycle_engine.server.access import AccessRules
    from lifecycle_engine.server.app import AppSettings
    from lifecycle_engine.server.remote_images import FetchLimits, HttpsGet
    from lifecycle_engine.server.service import Deadlines

    engine, access = config.engine, config.access
    api_keys = _keys(access.api_keys, access.api_key_file, "access.api_key_file")
    return AppSettings(
        model=model_name(config.model),
        total_bytes=config.admission.bytes or default_budget(),
        body_bytes=config.admission.max_body,
        body_timeout=config.admission.body_timeout,
        max_waiting=config.admission.max_waiting,
        max_wait=config.admission.max_wait,
        order=config.admission.order,
        shadow=config.admission.shadow,
        defaults=_defaults_of(folder, config.model),
        deadlines=Deadlines(
            start=engine.start_timeout,
            first_token=engine.first_token_timeout,
            idle=engine.token_timeout,
            total=engine.total_timeout,
        ),
        threads=config.http.threads,
        per_client=config.admission.per_client or None,
        client=_clients(config, api_keys),
        access=AccessRules(
            api_keys=api_keys,
            admin_keys=_keys(
                access.admin_keys, access.admin_key_file, "access.admin_key_file"
            ),
            hosts=access.allowed_hosts,
            origins=access.allowed_origins,
        ),
        fetch=HttpsGet(FetchLimits()) if config.http.remote_images else None,
    )


def _defaults_of(folder: Path | None, config: ModelConfig) -> ChatDefaults:
    from lifecycle_engine.processing.processor import ChatDefaults, defaults_of

    if folder is None or config.sampling_defaults == "openai":
        return ChatDefaults()
    with _served(folder):
        return defaults_of(folder)


def _keys(keys: tuple[str, ...], file: Path | None, source: str) -> tuple[str, ...]:
    if file is None:
        return keys
    read = _read_keys(file, source)
    if not read:
        raise ConfigError(
            source,
            f"{file} holds no key, and every request would pass; write one per line",
        )
    return (*keys, *read)


def _clients(config: ServerConfig, api_keys: Sequence[str]) -> Callable[[Any], bytes]:
    from lifecycle_asgi import ClientIdentity, client_address

    file, keys = config.admission.client_keys, list(api_keys)
    if file is not None:
        keys += _read_keys(file, "admission.client_keys")
    elif not keys:
        return client_address
    return ClientIdentity(keys)


def _read_keys(file: Path, source: str) -> list[str]:
    try:
        text = _read_standard_input() if str(file) == "-" else file.read_text("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            source,
            f"{file} cannot be read: {why}; name a text file, or - for standard input",
        ) from None
    return text.split()


def _check_certificate(config: ServerConfig) -> None:
    """Read the certificate before anything starts."""
    certificate, key = config.http.ssl_certfile, config.http.ssl_keyfile
    if certificate is None:
        if key is not None:
            what = f"{key} is the key of no certificate; give --ssl-certfile as well"
            raise ConfigError("http.ssl_keyfile", what)
        return
    from lifecycle_engine.server.tls import server_context

    try:
        server_context(certificate, key)
    except (OSError, ValueError) as error:  # of ssl, too
        why = getattr(error, "reason", None) or getattr(error, "strerror", None)
        raise ConfigError(
            "http.ssl_certfile",
            f"{certificate} cannot be served: {why or error}; name PEM files of a "
            f"certificate and its key, without a password",
        ) from None


def _check_operator(config: ServerConfig) -> None:
    """Refuse to show all requests to other machines without a key."""
    from lifecycle_asgi.limits import is_loopback

    address = config.http.operator_address
    keyed = config.access.admin_keys or config.access.admin_key_file
    if keyed or not isinstance(address, tuple):
        return
    if not is_loopback(address[0]):
        raise ConfigError(
            "http.admin_listen",
            f"{address[0]} may be reached from other machines, which would see and "
            f"cancel all requests; give --admin-key-file FILE, or 127.0.0.1 instead",
        )


def _read_standard_input() -> str:
    if sys.stdin is None:  # closed by the process that started this one
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return sys.stdin.read()


def observers(names: Sequence[str]) -> Sequence[Observer]:
    """Import the functions of these names.

    Raises:
        ConfigError: One of them is not a function that observes events.
    """
    found = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            each = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                "http.observers",
                f"{name}: {error}; give MODULE:NAME, of a module on PYTHONPATH",
            ) from None
        if not callable(each) or _is_async(each):
            what = "async" if callable(each) else f"a {type(each).__name__}"
            raise ConfigError(
                "http.observers",
                f"{name} is {what}, not a function of an event that returns at once",
            )
        found.append(each)
    return found


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns what would have to be awaited."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    made = type(function).__call__  # of an object that can be called
    return any(kind(each) for kind in kinds for each in (function, made))


def _metrics() -> Metrics | None:
    try:
        from lifecycle_asgi.prometheus import Metrics
    except ImportError:  # the server runs without its extra
        return None
    return Metrics()
