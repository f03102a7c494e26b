"""The imports of the design, read from the import statements.

The lists below are the design. An import that they do not permit fails here, so a new
one is a decision that is written down, not an accident.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "src" / "lifecycle"
ADAPTERS = ROOT / "adapters"

# Time, chance and the outside world come in as arguments, so that all of the core
# runs under simulation.
FORBIDDEN_IN_CORE = {
    "time",
    "datetime",
    "random",
    "secrets",
    "uuid",
    "os",
    "socket",
    "select",
    "subprocess",
    "multiprocessing",
    "zmq",
}
# anyio offers neither a wake-up from any thread, nor a shield from `Task.cancel`.
KNOWS_EVENT_LOOPS = {"_closing", "_eventloop"}
# A lock whose holder a fork left behind has to be freed in the child.
KNOWS_FORKS = {"_lock"}
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
TESTING = {"testing"}
# What several processes share is outside of each of them: files, sockets, the host's
# clock. Nothing else of the core imports it.
SHARED = {"shared"}
# The bundled engine stands above all others; engines on Ray speak over another
# transport what those in a process speak over sockets.
MAY_USE = {
    "lifecycle_ray": {"lifecycle_zmq"},
    # The proxy is under admission; `lifecycle serve` is the engine's command.
    "lifecycle_tools": {"lifecycle_asgi", "lifecycle_engine"},
    "lifecycle_engine": {
        "lifecycle_asgi",
        "lifecycle_zmq",
        "lifecycle_ray",
    },
}

# The modules and folders of each package, from the floor upwards: each imports only
# those before it. Inside a folder, imports form no cycle.
LAYERS: dict[str, tuple[str, ...]] = {
    # Payloads and streams know nothing of gates, and the core knows no decorator.
    "lifecycle": (
        *("_validation", "_eventloop", "events", "_exceptions", "_lock", "_owner"),
        *(
            "_queues",
            "_error_payload",
            "_payload",
            "_closing",
            "_stream",
            "_thread_iterator",
            "_gate_statistics",
            "_lease",
            "_gate",
            "_ticket_gate",
            "_start",
        ),
        *("_session", "_sessions", "_signatures", "_managed_stream", "_decorators"),
        *("debug", "lowlevel", "shared"),
    ),
    "lifecycle_asgi": (
        *("asgi_types", "heap", "json_body", "media", "image_structure"),
        *("media_memory", "media_body", "media_profiles", "disconnects", "events"),
        *("request", "websocket", "middleware", "endpoint"),
        *("request_scope", "body", "responses", "refusals", "resume", "limits"),
        *("api_keys", "memory_limit", "admission_settings", "lanes"),
        *("learned_budget", "prometheus_collectors", "prometheus", "admission"),
        *("vllm_plugin", "sglang_plugin", "transformers_plugin", "litserve_plugin"),
        *("opentelemetry", "live_warnings", "live_snapshot", "live_view"),
        *("starlette", "testing", "uvicorn_protocol"),
    ),
    "lifecycle_zmq": (
        *("exceptions", "shared_memory", "codec", "protocol", "transport"),
        *("backend", "tensor_copy", "process", "heartbeat", "client_streams"),
        *(
            "loss_probe",
            "client",
            "flow_control",
            "server",
            "generator_backend",
            "supervisor",
        ),
        *("engine", "thread_engine"),
    ),
    "lifecycle_ray": ("placement", "replica", "router", "engine"),
    "lifecycle_tools": ("top", "check", "proxy", "command"),
    "lifecycle_engine": (
        *("_compat", "events", "errors", "multimodal", "processing", "core", "model"),
        *("sim", "worker", "api", "server", "config_values", "config", "factory"),
        *("doctor", "cli", "__main__"),
    ),
}


def modules(folder: Path) -> list[Path]:
    """Return every Python file under *folder*."""
    return sorted(folder.rglob("*.py"))


def imports(path: Path, *, every: bool = False) -> Iterator[tuple[str, str | None]]:
    """Yield what *path* imports: a dotted module and, for `from`, the name.

    With *every*, also what only type checkers import.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if every else at_run_time(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = absolute(path, node)
            for alias in node.names:
                yield base, alias.name


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_run_time(child)


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """Return the dotted module that a possibly relative import names."""
    if not node.level:
        return node.module or ""
    top = ROOT / "src" if path.is_relative_to(CORE) else ADAPTERS
    package = list(path.relative_to(top).parent.parts)
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def ours(path: Path, *, every: bool = False) -> Iterator[str]:
    """Yield the modules of `lifecycle` that *path* imports, without the package."""
    for module, name in imports(path, every=every):
        top, _, rest = module.partition(".")
        if top != "lifecycle":
            continue
        if rest:
            yield rest
        elif name is None:
            yield "__init__"
        else:
            known = (CORE / f"{name}.py").exists() or (CORE / name).is_dir()
            yield name if known else "__init__"


def core_name(path: Path) -> str:
    """Return the module or folder of the core that *path* is or is in."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def ids(paths: list[Path]) -> list[str]:
    """Return paths as pytest shows them."""
    return [str(path.relative_to(ROOT)) for path in paths]


CORE_FILES = modules(CORE)
ADAPTER_FILES = modules(ADAPTERS)


@pytest.mark.parametrize("path", CORE_FILES, ids=ids(CORE_FILES))
def test_keeps_the_world_out_of_the_core(path: Path) -> None:
    """No core module has a clock, socket or loop of its own (B20, fault-59)."""
    name = core_name(path)
    if name in TESTING | SHARED:
        return  # the one makes the world, and the other is about it
    found = {module.partition(".")[0] for module, _ in imports(path)}
    forbidden = FORBIDDEN_IN_CORE - ({"os"} if name in KNOWS_FORKS else set())
    assert found & forbidden == set()
    if name not in KNOWS_EVENT_LOOPS:
        assert found & {"asyncio", "trio"} == set()


@pytest.mark.parametrize("path", ADAPTER_FILES, ids=ids(ADAPTER_FILES))
def test_uses_only_public_names_from_adapters(path: Path) -> None:
    """An adapter reaches `lifecycle` through public names, and no other adapter."""
    adapter = path.relative_to(ADAPTERS).parts[0]
    private = {name for name in ours(path) if name.startswith("_")} - {"__init__"}
    assert private == set()
    found = {module.partition(".")[0] for module, _ in imports(path)}
    others = {name for name in found if name.startswith("lifecycle_")}
    assert others <= {adapter} | MAY_USE.get(adapter, set())
    for module, name in imports(path):
        if module.partition(".")[0] in others - {adapter}:
            parts = [*module.split("."), *([name] if name else [])]
            assert not any(part.startswith("_") for part in parts), module


PRODUCT_FILES = CORE_FILES + ADAPTER_FILES
# `testing` uses all of the core's public names, and makes the world that it has not.
LAYERED_FILES = [
    path
    for path in PRODUCT_FILES
    if path.parent.name != "testing"
    and not (path.name == "__init__.py" and path.with_name("py.typed").exists())
]


def folder(package: str) -> Path:
    """Return the folder of a package of ours."""
    return CORE if package == "lifecycle" else ADAPTERS / package


def layer(package: str, parts: Sequence[str]) -> str:
    """Return the module or folder of *package* that *parts* lead to."""
    name = parts[0].removesuffix(".py") if parts else "__init__"
    path = folder(package) / name
    return name if path.with_suffix(".py").exists() or path.is_dir() else "__init__"


@pytest.mark.parametrize("path", LAYERED_FILES, ids=ids(LAYERED_FILES))
def test_imports_only_lower_layers(path: Path) -> None:
    """A module imports modules below it in its package, and never one above it."""
    core = path.is_relative_to(CORE)
    package, *parts = path.relative_to(CORE.parent if core else ADAPTERS).parts
    own = layer(package, parts)
    order = LAYERS[package]
    below = order[: order.index(own)]
    for module, name in imports(path, every=core):
        top, *rest = module.split(".")
        if top == package:
            drawn = layer(package, [*rest, *([name] if name else [])])
            assert drawn in below or drawn == own, module


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=ids(PRODUCT_FILES))
def test_pickles_nothing(path: Path) -> None:
    """S1: no module imports a pickle or calls one through a library."""
    assert {module.partition(".")[0] for module, _ in imports(path)} & PICKLES == set()
    called = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert called & {"recv_pyobj", "send_pyobj"} == set()


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=ids(PRODUCT_FILES))
def test_forks_nothing(path: Path) -> None:
    """Whatever is started is a new program: no thread or device is copied (fault-38, S6)."""
    modules = {module.partition(".")[0] for module, _ in imports(path)}
    if path.name != "litserve_plugin.py":  # whose memory LitServe's processes share
        assert modules & {"multiprocessing", "pty"} == set()
    words = {
        getattr(node, "attr", getattr(node, "arg", ""))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.keyword)
    }
    assert words & {"fork", "forkpty", "preexec_fn"} == set()
