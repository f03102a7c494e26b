"""The imports of the design, read from the import statements.

The list below is the design. An import that is not on it fails here, so a new
arrow is a decision that is written down, not an accident.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "src" / "lifecycle"
ADAPTERS = ROOT / "adapters"

# Which module of the core may import which, from the floor upwards. A module that is
# not named here may import nothing of ours; `__init__` collects the public names and
# may import them all. What only type checkers import counts, too.
FLOOR = {"_exceptions", "events", "_eventloop", "_validation"}
ARROWS: dict[str, set[str]] = {
    "_validation": set(),
    "_eventloop": set(),
    "events": set(),
    "_exceptions": {"events"},
    "_lock": set(),
    "_owner": set(),
    # Queues are pure: they order and count tickets, and refuse nothing themselves.
    "_queues": set(),
    # Payloads and streams know nothing of gates.
    "_payload": {"_validation"},
    "_closing": {"_eventloop"},
    "_stream": {"_closing", "_exceptions", "_validation"},
    "_thread_iterator": {"_eventloop", "_payload", "_validation"},
    "_gate": {"_lock", "_owner", "_queues"} | FLOOR,
    # A start is given what it needs of its session.
    "_start": {"_payload"} | FLOOR,
    "_session": {"_gate", "_payload", "_start", "_stream"} | FLOOR,
    "_sessions": {"_owner", "_session", "_start", "_stream"} | FLOOR,
    # On top: only `__init__` imports decorators, diagnostics and adapters' tools.
    "_signatures": {"_stream"},
    "_managed_stream": {
        *("_gate", "_payload", "_session", "_sessions", "_stream", "_thread_iterator"),
    },
    "_decorators": {
        *("_gate", "_managed_stream", "_session", "_sessions", "_signatures"),
        *("_stream", "_thread_iterator", "_validation"),
    },
    "debug": {"_gate", "_payload", "_queues", "_session", "_sessions"},
    "lowlevel": {"_eventloop", "_owner", "_payload", "_queues", "_validation"},
}
# A decorator knows the core, and the core knows no decorator.
DECORATORS = {"_decorators", "_managed_stream", "_signatures"}
TOP = DECORATORS | {"debug", "lowlevel"}

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
# Public like the adapters, and above the core like them.
TESTING = {"testing", "pytest_plugin"}
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

# The modules and folders of each larger adapter, from the floor upwards: each imports
# only those before it. Inside a folder, imports form no cycle.
LAYERS: dict[str, tuple[str, ...]] = {
    "lifecycle_asgi": (
        *("_types", "media", "image_structure", "media_memory", "media_body"),
        *("media_profiles", "events", "request", "middleware"),
        *("request_scope", "body", "responses", "refusals", "limits", "api_keys"),
        *("admission_settings", "lanes", "admission"),
        *("vllm_plugin", "sglang_plugin"),
        *("prometheus_collectors", "prometheus", "opentelemetry"),
        *("live_warnings", "live_snapshot", "live_view", "starlette", "testing"),
        "uvicorn_protocol",
    ),
    "lifecycle_zmq": (
        *("exceptions", "shared_memory", "codec", "protocol", "transport"),
        *("backend", "tensor_copy", "process", "heartbeat", "client_streams"),
        *("client", "flow_control", "server", "generator_backend", "supervisor"),
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
# What other adapters may import from inside `lifecycle_zmq`: they bring another
# transport for it.
LINK_OPEN = {
    "lifecycle_zmq",
    "lifecycle_zmq.protocol",
    "lifecycle_zmq.supervisor",
    "lifecycle_zmq.thread_engine",
    "lifecycle_zmq.transport.base",
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
    """Return the name by which the list of arrows knows *path*."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def ids(paths: list[Path]) -> list[str]:
    """Return paths as pytest shows them."""
    return [str(path.relative_to(ROOT)) for path in paths]


CORE_FILES = modules(CORE)
ADAPTER_FILES = modules(ADAPTERS)


@pytest.mark.parametrize("path", CORE_FILES, ids=ids(CORE_FILES))
def test_draws_only_allowed_arrows_inside_core(path: Path) -> None:
    """A core module imports only what the design lets it, type checking included."""
    name = core_name(path)
    if name == "__init__":
        return
    if name in TESTING:
        allowed = {
            module.stem for module in CORE_FILES if not module.stem.startswith("_")
        } | {"__init__", name}
    else:
        allowed = ARROWS.get(name, set())
    drawn = {module.partition(".")[0] for module in ours(path, every=True)}
    assert drawn - allowed == set(), f"{name} may import only {sorted(allowed)}"


def test_imports_the_top_of_the_core_from_nowhere() -> None:
    """Decorators, diagnostics and tools for adapters are imported by no other module."""
    for path in CORE_FILES:
        name = core_name(path)
        drawn = {module.partition(".")[0] for module in ours(path, every=True)}
        above = TOP - DECORATORS if name in DECORATORS else TOP
        assert name == "__init__" or not drawn & above, name


def test_names_only_modules_that_exist() -> None:
    """The list of arrows has no entry for a module that is gone."""
    assert set(ARROWS) <= {core_name(path) for path in CORE_FILES}


@pytest.mark.parametrize("path", CORE_FILES, ids=ids(CORE_FILES))
def test_keeps_the_world_out_of_the_core(path: Path) -> None:
    """No core module has a clock, socket or loop of its own (B20, fault-59)."""
    name = core_name(path)
    if name in TESTING:
        return  # it makes the world
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


LINK = ADAPTERS / "lifecycle_zmq"
LAYERED_FILES = [
    path for path in ADAPTER_FILES if path.relative_to(ADAPTERS).parts[0] in LAYERS
]


def layer(package: str, parts: Sequence[str]) -> str:
    """Return the module or folder of *package* that *parts* lead to."""
    name = parts[0].removesuffix(".py") if parts else "__init__"
    folder = ADAPTERS / package
    known = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    return name if known else "__init__"


@pytest.mark.parametrize("path", LAYERED_FILES, ids=ids(LAYERED_FILES))
def test_imports_only_lower_layers(path: Path) -> None:
    """A module of an adapter imports modules below it, and never one above it."""
    package, *parts = path.relative_to(ADAPTERS).parts
    order = (*LAYERS[package], "__init__")
    own = layer(package, parts)
    below = order[: order.index(own)]
    for module, name in imports(path):
        top, *rest = module.split(".")
        if top == package:
            drawn = layer(package, [*rest, *([name] if name else [])])
            assert drawn in below or drawn == own != "__init__", module


@pytest.mark.parametrize("package", LAYERS)
def test_names_every_layer(package: str) -> None:
    """The order lists all modules and folders of the package, and no more."""
    files = [path for path in LAYERED_FILES if path.is_relative_to(ADAPTERS / package)]
    found = {
        layer(package, path.relative_to(ADAPTERS / package).parts) for path in files
    }
    assert found - {"__init__"} == set(LAYERS[package])


@pytest.mark.parametrize("path", ADAPTER_FILES, ids=ids(ADAPTER_FILES))
def test_opens_few_modules_of_the_link_to_others(path: Path) -> None:
    """What no other adapter imports may be moved without asking them."""
    if path.is_relative_to(LINK):
        return
    for module, name in imports(path):
        if module.partition(".")[0] == "lifecycle_zmq":
            inner = ADAPTERS.joinpath(*module.split("."), name or "")
            deeper = name and (inner.is_dir() or inner.with_suffix(".py").exists())
            assert (f"{module}.{name}" if deeper else module) in LINK_OPEN


PRODUCT_FILES = CORE_FILES + ADAPTER_FILES


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
    assert modules & {"multiprocessing", "pty"} == set()
    words = {
        getattr(node, "attr", getattr(node, "arg", ""))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.keyword)
    }
    assert words & {"fork", "forkpty", "preexec_fn"} == set()


def test_keeps_adapters_a_folder() -> None:
    """`adapters` is never importable: the name belongs to another distribution."""
    assert not (ADAPTERS / "__init__.py").exists()


TEST_FILES = [path for path in modules(ROOT / "tests") if path.name.startswith("test_")]


@pytest.mark.parametrize("path", TEST_FILES, ids=ids(TEST_FILES))
def test_states_a_fact_in_every_test(path: Path) -> None:
    """Every test says in its docstring what is true."""
    silent = [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_draws_no_circle_in_the_core() -> None:
    """Following the arrows never comes back, so the list itself is sound."""
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for target in ARROWS[name]:
                walk(target, (*path, name))
            done.add(name)

    for name in ARROWS:
        walk(name, ())
