"""The configuration of ``lifecycle serve``: one `ServerConfig`, five sections.

Each field of a section is one key of the TOML file, one option of the command and one
environment variable: ``threads`` of ``[http]`` is ``--threads`` and
``LIFECYCLE_HTTP_THREADS``. Those of ``[admission]``, and the keys of clients, have the
names that `lifecycle_asgi.Admission` reads: ``LIFECYCLE_SLOTS``. The entry of a field
in the docstring of its section is the help of all three.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .config_values import (
    Amount,
    Count,
    Drafts,
    FilePath,
    Form,
    Function,
    Listener,
    Network,
    Seconds,
    Secret,
    Size,
    SomeBytes,
    Text,
    Timeout,
    Whole,
    brief,
    items_of,
    split_address,
)

ENVIRONMENT = "LIFECYCLE_"
CONFIG_VARIABLE = f"{ENVIRONMENT}CONFIG"
"""The environment variable that names the TOML file."""

# Options that are not named as their key; that of a list is in the singular.
_OPTIONS = {"name": "model", "executor": "engine"}
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_RAY_ONLY = ("ray_address", "replicas", "gpus")
# Variables that Kubernetes sets for a service whose name begins with "lifecycle".
_KUBERNETES_NAME = re.compile(
    r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$"
)
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


class ConfigError(ValueError):
    """A value that the server cannot be configured with.

    Attributes:
        source: The option, environment variable or key of a file that it came from.
        problem: The value, its limit, and the remedy.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section, as users see it."""

    section: str
    key: str
    kind: Any
    form: Form
    many: bool
    help: str
    option: str
    default: Any

    @property
    def name(self) -> str:
        """A name in Python, unique among all settings."""
        return f"{self.section}_{self.key}"

    @property
    def variable(self) -> str:
        """The environment variable: of the section and the option, ``LIFECYCLE_``.

        An option with the name of its section does not repeat it: ``LIFECYCLE_MODEL``.
        Those of admission, and the keys of clients, have the names of
        `lifecycle_asgi.AdmissionSettings`.
        """
        if self.section == "admission" or self.key == "api_keys":
            return ENVIRONMENT + self.key.upper()
        section, option = self.section.upper(), _upper(self.option)
        return ENVIRONMENT + (option if section == option else f"{section}_{option}")

    @property
    def path(self) -> str:
        """The key with its section, as in TOML."""
        return f"{self.section}.{self.key}"

    @property
    def shown_default(self) -> str:
        """The default as in TOML; empty if there is none, or the help says it."""
        return "" if self.default == () else self.show(self.default).strip('"')

    def show(self, value: Any) -> str:
        """Return a value as TOML; empty if there is none, or it is secret."""
        if value is None or (value and self.form.secret):
            return ""
        if self.many:
            return f"[{', '.join(map(self.form.show, value))}]"
        return self.form.show(value)

    def parse(self, source: str, value: Any) -> Any:
        """Return the checked value.

        Raises:
            ConfigError: With *source*, the value, its limit and the remedy.
        """
        try:
            if not self.many:
                return self.form.parse(self.kind, value)
            return tuple(self.form.parse(self.kind, each) for each in items_of(value))
        except ValueError as error:
            raise ConfigError(source, str(error)) from None


def _upper(option: str) -> str:
    return option.removeprefix("--").replace("-", "_").upper()


def _name_of(section: type[_Section]) -> str:
    return section.__name__.removesuffix("Config").lower()


class _Section:
    """Checks the fields of a section when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            value = getattr(self, setting.key)
            if value is not setting.default:
                checked = setting.parse(setting.path, value)
                object.__setattr__(self, setting.key, checked)


def misfit(section: _Section, key: str, why: str) -> ConfigError:
    """Return the error of a value that does not go with others."""
    value = getattr(section, key)
    shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return ConfigError(f"{_name_of(type(section))}.{key}", f"{brief(shown, str)} {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Section):
    """The model, and how it generates.

    Attributes:
        checkpoint: Folder of the model's checkpoint. Required, except with --runner
            sim.
        name: Model name for clients. Default: the name of the checkpoint folder.
        runner: torch runs the checkpoint; sim simulates a model and needs no torch.
        device: Device that torch runs the model on.
        dtype: Data type of the weights. Default: the checkpoint's on cuda, else
            float32.
        max_length: Maximum number of tokens of prompt and answer together. Default: the
            model's limit, at most 8192.
        sampling_defaults: Sampling defaults for requests that set none: the model's
            generation_config, or OpenAI's.
    """

    checkpoint: FilePath | None = None
    name: Text | None = None
    runner: Literal["torch", "sim"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    max_length: Count | None = None
    sampling_defaults: Literal["model", "openai"] = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(_Section):
    """Admission control: concurrent requests, their memory, and the queues.

    Attributes:
        slots: Maximum number of concurrent requests; 0 is unlimited.
        per_client: Maximum number of concurrent requests of one client; 0 is unlimited.
        client_keys: File of API keys, one per line; - is standard input. A key
            identifies a client; requests without a known key are identified by their
            address.
        max_waiting: Maximum number of requests that wait at each gate; more are
            refused.
        max_wait: Maximum wait at a gate; then the request is refused.
        order: Whether clients that wait take turns, requests go by their arrival, or
            the newest goes first while overload lasts.
        shadow: Refuse no request for want of a slot or of room for its body, nor for
            --per-client, and let none wait for them, but count these requests in
            /metrics: to try limits out. If the engine shares memory (--arena-bytes),
            images wait for room and for --media-slots all the same, or are refused.
        media_slots: Maximum number of requests with images that are preprocessed or
            handed to the engine at once; the others wait. Default: as many as --bytes
            permits.
        bytes: Memory of all requests until the engine has them: a quarter for bodies,
            the rest for images, or as much as --arena-bytes. Default: 4GiB, or half of
            what the cgroup or the machine has, if that is less.
        max_body: Maximum size of a request body; a sixteenth of --bytes at most.
        body_timeout: Time limit for a body. After 2 s, it is charged with what has
            arrived.
    """

    slots: Whole = 256
    per_client: Whole = 0
    client_keys: FilePath | None = None
    max_waiting: Whole = 1024
    max_wait: Seconds = 60.0
    order: Literal["fair", "fifo", "adaptive"] = "fair"
    shadow: bool = False
    media_slots: Count | None = None
    bytes: SomeBytes | None = None
    max_body: SomeBytes = 64 * 2**20
    body_timeout: Timeout = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig(_Section):
    """Access control: API keys, the operator's key, and web pages of other sites.

    Attributes:
        api_keys: Key that a client must send; may be repeated. The environment, or
            --api-key-file, keeps it out of the list of processes.
        api_key_file: File of API keys, one per line; - is standard input.
        admin_keys: Key for /_lifecycle and /metrics; may be repeated. Needed where
            --admin-listen can be reached from other machines.
        admin_key_file: File of such keys, one per line; - is standard input.
        allowed_hosts: Name of the server that a request to a loopback address may have
            in Host, besides addresses and names without a dot; may be repeated, * is
            any.
        allowed_origins: Origin of web pages that may send requests (CORS), as
            https://chat.example; may be repeated, * is any.
    """

    api_keys: tuple[Secret, ...] = dataclasses.field(default=(), repr=False)
    api_key_file: FilePath | None = None
    admin_keys: tuple[Secret, ...] = dataclasses.field(default=(), repr=False)
    admin_key_file: FilePath | None = None
    allowed_hosts: tuple[Text, ...] = ()
    allowed_origins: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig(_Section):
    """The HTTP server: connections, request bodies, shutdown and logs.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        admin_listen: Address of the operator's pages, /_lifecycle and /metrics:
            HOST:PORT, unix:PATH of a socket, or off. Default: 127.0.0.1, at --port +
            10000, or a free one if that is taken.
        ssl_certfile: PEM file of the certificate, and its chain; serves HTTPS.
        ssl_keyfile: PEM file of the key. Default: in --ssl-certfile.
        proxies: Address or network of a trusted proxy; may be repeated. X-Forwarded-For
            is ignored from all other addresses.
        max_connections: Maximum number of connections; more get 503, or are cut by
            HTTPS.
        header_timeout: Time limit for the head of a request, and for TLS before it.
        half_closed: Answer clients that have finished sending. By default they count as
            gone, as nearly all of them are.
        send_timeout: Time limit for a client to read 64 KiB of an answer; then the
            connection is closed.
        threads: Number of threads that preprocess texts, and of those for pictures.
        remote_images: Fetch images that requests name by https URL, from public
            addresses only.
        drain: Time that running streams get to finish after SIGTERM.
        log: Log failed requests only, or each request as JSON or for a terminal.
        observers: Function that is called with every lifecycle event; may be repeated.
    """

    host: Text = "127.0.0.1"
    port: Annotated[int, Form("N", ge=0, le=65535)] = 8000
    admin_listen: Listener | None = None
    ssl_certfile: FilePath | None = None
    ssl_keyfile: FilePath | None = None
    proxies: tuple[Network, ...] = ()
    max_connections: Count = 16384
    header_timeout: Timeout = 10.0
    half_closed: bool = False
    send_timeout: Timeout = 30.0
    threads: Count = 2
    remote_images: bool = False
    drain: Seconds = 10.0
    log: Literal["failures", "json", "console"] = "failures"
    observers: tuple[Function, ...] = ()

    @property
    def operator_address(self) -> tuple[str, int] | Path | None:
        """Where the operator's pages are served; ``None`` if they are off."""
        given = self.admin_listen
        if given is None:
            # It moves with --port, and is no neighbour: servers of one machine have
            # ports in a row.
            far = 10_000 if self.port + 10_000 <= 65535 else -10_000
            return "127.0.0.1", self.port + far if self.port else 0
        if given.startswith("unix:"):
            return Path(given.removeprefix("unix:"))
        return None if given == "off" else split_address(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(_Section):
    """The engine: where it runs, its batches, its memory and its timeouts.

    Attributes:
        executor: process runs the engine in a child process; ray runs it in Ray actors.
        ray_address: Address of a Ray cluster. Default: starts a private one.
        replicas: Number of engines on Ray.
        gpus: GPUs of each engine on Ray. Default: 1 on cuda, else 0.
        max_batch: Maximum number of requests in one engine step.
        kv_slots: Number of KV cache slots: for the requests of a step, and for
            conversations between two turns (prompt_cache_key). Each takes the memory of
            --max-length tokens. Default: --max-batch.
        chunk: Maximum number of prompt tokens prefilled in one step.
        tp: Number of processes that each run a part of the model (tensor parallel); on
            cuda, each has a GPU of its own.
        graphs: Whether torch decodes with CUDA graphs; fake runs steps of the same
            shapes without them, on any device. Default: on with --device cuda, off
            without it or with --tp.
        buckets: Batch size that graphs are made for; may be repeated. Default: powers
            of two.
        speculative: Where drafts of further tokens come from, which each step of torch
            checks: ngram repeats earlier text of the request, draft=FOLDER runs a
            smaller text model with the same tokenizer. Default: no drafts.
        draft_tokens: Maximum number of drafts in a step.
        arena_bytes: Size of the memory shared with a local engine, which reads payloads
            there; 0 sends payloads instead. Default: 2GiB, or the images' part of
            --bytes, if that is less.
        stalled_after: Time limit for an engine step; then the engine is restarted.
        start_timeout: Time limit for the engine to accept a request, preprocessing
            included.
        first_token_timeout: Time limit for the first token of an answer.
        token_timeout: Time limit between two tokens of an answer.
        total_timeout: Time limit for a whole answer. Default: unlimited.
    """

    executor: Literal["process", "ray"] = "process"
    ray_address: Text | None = None
    replicas: Count = 1
    gpus: Amount | None = None
    max_batch: Count = 8
    kv_slots: Count | None = None
    chunk: Count = 512
    tp: Count = 1
    graphs: Literal["on", "off", "fake"] | None = None
    buckets: tuple[Count, ...] = ()
    speculative: Drafts | None = None
    draft_tokens: Count = 4
    arena_bytes: Size | None = None
    stalled_after: Annotated[float, Form("SECONDS", ge=1)] = 30.0
    start_timeout: Timeout = 60.0
    first_token_timeout: Timeout = 120.0
    token_timeout: Timeout = 60.0
    total_timeout: Timeout | None = None

    def __post_init__(self) -> None:
        # No super() without arguments: slots make the decorator replace the class.
        _Section.__post_init__(self)
        if self.kv_slots is not None and self.kv_slots < self.max_batch:
            batch = brief(self.max_batch)
            give = f"give {batch} or more, or a smaller max_batch"
            why = f"cannot hold a batch of {batch}; {give}"
            raise misfit(self, "kv_slots", why)
        for field in dataclasses.fields(self) if self.executor != "ray" else ():
            if field.name in _RAY_ONLY and getattr(self, field.name) != field.default:
                why = "has no effect on an engine in a child process; give --engine ray"
                raise misfit(self, field.name, f"{why} as well, or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of a server.

    Attributes:
        model: The model, and how it generates.
        admission: Concurrent requests, their memory, and the queues.
        access: API keys, the operator's key, and web pages of other sites.
        http: Connections, request bodies, shutdown and logs.
        engine: Where the engine runs, its batches, memory and timeouts.
        sources: The option, environment variable or key of a file that each value came
            from, by ``section.key``; for error messages.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    admission: AdmissionConfig = dataclasses.field(default_factory=AdmissionConfig)
    access: AccessConfig = dataclasses.field(default_factory=AccessConfig)
    http: HttpConfig = dataclasses.field(default_factory=HttpConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    sources: Mapping[str, str] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def source_of(self, path: str) -> str:
        """Return where the value of a setting came from, given ``section.key``."""
        return self.sources.get(path, path)

    def to_toml(self) -> str:
        """Return the settings as a TOML file that `load_config` reads back."""
        lines: list[str] = []
        for name, section in SECTIONS.items():
            lines += ["", f"[{name}]"]
            for setting in settings_of(section):
                shown = setting.show(getattr(getattr(self, name), setting.key))
                key = setting.key
                lines.append(f"{key} = {shown}" if shown else f"# {key}")
        return "\n".join(lines[1:]) + "\n"


SECTIONS: dict[str, type[_Section]] = {
    _name_of(each): each
    for each in (ModelConfig, AdmissionConfig, AccessConfig, HttpConfig, EngineConfig)
}


def settings_of(section: type[_Section]) -> Iterator[Setting]:
    """Yield the settings of a section, in their order."""
    kinds = get_type_hints(section, include_extras=True)
    helps = dict(_ATTRIBUTE.findall(inspect.getdoc(section) or ""))
    if not helps:  # under -OO, only the source has docstrings
        with suppress(OSError):
            _, docstring, *_ = inspect.getsource(section).split('"""')
            helps = dict(_ATTRIBUTE.findall(inspect.cleandoc(docstring)))
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        kind, key = kinds[field.name], field.name
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        if many := get_origin(kind) is tuple:
            kind = get_args(kind)[0]
            key = re.sub("ies$", "y", key).removesuffix("s")
        yield Setting(
            section=_name_of(section),
            key=field.name,
            kind=kind,
            form=Form.of(kind),
            many=many,
            help=" ".join(helps.get(field.name, "").split()),
            option=f"--{_OPTIONS.get(key, key).replace('_', '-')}",
            default=field.default,
        )


SETTINGS = tuple(each for name in SECTIONS for each in settings_of(SECTIONS[name]))
"""Every setting of the server."""


def load_config(
    options: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ServerConfig:
    """Merge all sources: an option wins over the environment, this over the file.

    Args:
        options: Values by `Setting.name`; ``None`` is unset.
        environment: Such as `os.environ`. Empty values are ignored, and names that
            are no setting; see `unknown_variables`.
        file: A TOML file with a table for each section.

    Raises:
        ConfigError: A value is wrong, the file has an unknown key, or a variable is no
            setting but looks like one of access.
        OSError: The file cannot be read.
    """
    options, environment = options or {}, environment or {}
    _check_access(environment)
    document = _read(file) if file else {}
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        table = document.get(setting.section, {})
        sources = (
            (setting.option, options.get(setting.name)),
            (setting.variable, environment.get(setting.variable) or None),
            (f"{file}: {setting.path}", table.get(setting.key)),
        )
        for source, value in sources:
            if value is not None:
                checked = setting.parse(source, value)
                values[setting.section].setdefault(setting.key, checked)
                origins.setdefault(setting.path, source)
        origins.setdefault(setting.path, setting.option)
    try:
        made: Any = {name: SECTIONS[name](**values[name]) for name in SECTIONS}
        return ServerConfig(**made, sources=origins)
    except ConfigError as error:  # of values that do not fit together
        source = origins.get(error.source, error.source)
        raise ConfigError(source, error.problem) from None


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each ``LIFECYCLE_*`` variable that is no setting.

    Variables that Kubernetes sets for services are left out.
    """
    # A key of the file, or an option without its section, is a likely mistake.
    known = {"CONFIG": CONFIG_VARIABLE}
    for each in SETTINGS:
        known[each.name.upper()] = known[_upper(each.option)] = each.variable
    known |= {
        each.variable.removeprefix(ENVIRONMENT): each.variable for each in SETTINGS
    }
    for name in sorted(environment):
        value = environment[name]
        if not (name.startswith(ENVIRONMENT) and value) or name in known.values():
            continue
        if _KUBERNETES_NAME.search(name) or _KUBERNETES_VALUE.match(value):
            continue
        close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT), known, 1)
        hint = f"the nearest name is {known[close[0]]}" if close else "--help lists all"
        yield f"{name} is no setting of the server; {hint}"


def _check_access(environment: Mapping[str, str]) -> None:
    """Refuse a misspelt name of keys, without which the server would be open."""
    access = {each.variable for each in SETTINGS if each.section == "access"}
    for sentence in unknown_variables(environment):
        name, _, problem = sentence.partition(" ")
        if "KEY" in name or problem.rpartition(" ")[2] in access:
            raise ConfigError(name, problem)


def _read(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
        raise ConfigError(str(file), f"{brief(error, str)}; correct the TOML") from None
    _check_keys(document, list(SECTIONS), str(file), "section")
    for name, table in document.items():
        if not isinstance(table, dict):
            what = f"{type(table).__name__} is not a table; write [{name}]"
            raise ConfigError(f"{file}: {name}", what)
        keys = [setting.key for setting in SETTINGS if setting.section == name]
        _check_keys(table, keys, f"{file}: [{name}]", "key")
    return document


def _check_keys(
    table: Mapping[str, Any], known: list[str], source: str, what: str
) -> None:
    for key in table:
        if key not in known:
            hint = f"known: {', '.join(known)}"
            if close := difflib.get_close_matches(key, known, 1):
                hint = f"did you mean {close[0]}?"
            for setting in SETTINGS:
                if key == setting.key:
                    hint = f"it belongs in [{setting.section}]"
            raise ConfigError(source, f"{brief(key, str)} is not a {what}; {hint}")
