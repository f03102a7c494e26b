"""The arrows of the design, read off the import statements.

The list below is the design. An import that is not on it fails here, so a new
arrow is a decision somebody writes down, not an accident.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "src" / "lifecycle"
ADAPTERS = ROOT / "adapters"

# Who in the core may import whom, from the floor upwards. A module that is not
# named here may import nothing of ours; `__init__` collects the public names and
# may import them all. What only type checkers import draws no arrow.
FLOOR = {"_errors", "events", "_park", "_checks", "_refusal", "_monitor"}
ARROWS: dict[str, set[str]] = {
    # The gate's books: pure, synchronous, no errors of ours but refusals.
    "_ledger": set(),
    "_fair": {"_ledger"},
    "_lease": {"_ledger"} | FLOOR,
    "_books": {"_lease", "_ledger"} | FLOOR,
    # Payloads and streams know nothing of gates.
    "_payload": {"_checks"},
    "_stream": {"_checks"},
    "_watchdog": {"_stream", "_errors", "_checks"},
    # Sessions know starts, a start knows its lease; nothing knows the registry.
    "_start": {"_lease", "_payload"} | FLOOR,
    "_outcome": {"_errors", "events"},
    "_session": {"_lease", "_outcome", "_start", "_stream", "_watchdog", "_payload"}
    | FLOOR,
    "_decorators": {"_checks", "_outcome", "_stream", "_payload"},
    # `Gate.admits` and `SessionRegistry.track` are decorators, hence the last arrows.
    "_gate": {"_books", "_fair", "_lease", "_ledger"} | FLOOR | {"_decorators"},
    "_crew": FLOOR,
    "_sessions": {"_crew", "_outcome", "_session", "_watchdog"}
    | FLOOR
    | {"_decorators"},
    "observers": {"events"},
    # Diagnostics look at everything, and nothing knows of them.
    "_holders": set(),
    "inspect": {"_holders", "_gate", "_lease", "_sessions"},
} | {name: set() for name in FLOOR}

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
# Waking a task from any thread is the one thing that anyio does not offer.
KNOWS_EVENT_LOOPS = {"_park"}
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Public like the adapters, and above the core like them.
TESTING = {"testing", "pytest_plugin"}
# The bundled engine stands above all others; engines on Ray speak over another
# transport what those in a process speak over sockets; observers know the events.
MAY_USE = {
    "lifecycle_ray": {"lifecycle_zmq"},
    "lifecycle_metrics": {"lifecycle_asgi"},
    "lifecycle_otel": {"lifecycle_asgi"},
    "lifecycle_engine": {
        "lifecycle_asgi",
        "lifecycle_metrics",
        "lifecycle_otel",
        "lifecycle_zmq",
        "lifecycle_ray",
    },
}

# The rooms of the engine link, from the floor upwards: each imports those before it.
LINK_FLOOR = ("_errors", "_hand_off", "_options", "_slot")
LINK_ROOMS = (
    *("memory", "protocol", "transport", "process", "client", "server"),
    "supervision",
)
LINK_ORDER = (*LINK_FLOOR, *LINK_ROOMS, "engine", "thread", "__init__")
# What other adapters may have of the link, who bring another transport for it.
LINK_OPEN = {
    "lifecycle_zmq",
    "lifecycle_zmq.protocol.wire",
    "lifecycle_zmq.supervision.life",
    "lifecycle_zmq.transport",
    "lifecycle_zmq.transport.bell",
    "lifecycle_zmq.transport.queued",
}


def modules(folder: Path) -> list[Path]:
    """Return every Python file under *folder*."""
    return sorted(folder.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield what *path* imports: a dotted module and, for `from`, the name."""
    for node in at_run_time(ast.parse(path.read_text())):
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


def ours(path: Path) -> Iterator[str]:
    """Yield the modules of `lifecycle` that *path* imports, without the package."""
    for module, name in imports(path):
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
    """A core module imports only what the design lets it."""
    name = core_name(path)
    if name == "__init__":
        return
    if name in TESTING:
        allowed = {
            module.stem for module in CORE_FILES if not module.stem.startswith("_")
        } | {"__init__", name}
    else:
        allowed = ARROWS.get(name, set())
    drawn = {module.partition(".")[0] for module in ours(path)}
    assert drawn - allowed == set(), f"{name} may import only {sorted(allowed)}"


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
    assert found & FORBIDDEN_IN_CORE == set()
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
LINK_FILES = modules(LINK)


def link_name(parts: Sequence[str]) -> str:
    """Return the room, or the module outside of all rooms, that *parts* lead to."""
    name = parts[0].removesuffix(".py") if parts else "__init__"
    known = (LINK / f"{name}.py").exists() or (LINK / name).is_dir()
    return name if known else "__init__"


@pytest.mark.parametrize("path", LINK_FILES, ids=ids(LINK_FILES))
def test_builds_each_room_of_the_link_on_those_below(path: Path) -> None:
    """Whoever reads a room needs to know those before it, and never one after it."""
    own = link_name(path.relative_to(LINK).parts)
    below = LINK_ORDER[: LINK_ORDER.index(own)]
    for module, name in imports(path):
        package, *rest = module.split(".")
        if package == "lifecycle_zmq":
            drawn = link_name([*rest, *([name] if name else [])])
            assert drawn in below or (drawn == own in LINK_ROOMS), module


def test_names_every_room_of_the_link() -> None:
    """The order has all rooms and no more; none but the transports' is code by itself."""
    assert {link_name(path.relative_to(LINK).parts) for path in LINK_FILES} == set(
        LINK_ORDER
    )
    for room in LINK_ROOMS:
        body = ast.parse((LINK / room / "__init__.py").read_text()).body
        assert len(body) == 1 or room == "transport"


@pytest.mark.parametrize("path", ADAPTER_FILES, ids=ids(ADAPTER_FILES))
def test_opens_few_rooms_of_the_link_to_others(path: Path) -> None:
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
