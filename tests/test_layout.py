"""The layout of the source: few files, no cycles, and tests through public names.

The figures are ceilings that keep the code readable in an evening. Raise one only with
a reason written beside it.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for top in (ROOT / "src", ROOT / "adapters")
    for path in sorted(top.rglob("*.py"))
}
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Of the packages that a request passes through; the tools beside them come apart. Eight
# are the gate over processes and its seams, and one is a budget that is learned.
MOST_FILES = 155
TOOLS = {"lifecycle_tools"}
MOST_FILES_OF_TOOLS = 30
MOST_LINES_OF_A_FILE = 700
MOST_LINES_OF_A_FUNCTION = 60
# Six of them are of what worker processes share: no public name leads to a stop between
# two steps. Another is of a budget that is learned: `Admission` takes no clock.
MOST_TESTS_OF_INTERNALS = 53
# Files that one request enters, in both processes of a real server, with a few to spare
# for what a request only sometimes meets; `python scripts/trace_request.py --files` lists
# them.
MOST_FILES_ENTERED = {"text": 62, "picture": 70, "disconnect": 40}
# The same in `Admission` alone.
MOST_FILES_OF_ADMISSION = 16

# Lines of Python, with a little to spare. A gate over processes took 1,700, streams that
# are resumed 600, memory that is given back or fits the cgroup 300, metrics of the engine
# by name, with lists and logs for the operator, 300, `transformers serve` 160,
# WebSockets through the proxy 400, an order for overload 150, LitServe 300, and machines
# that lack or forbid something 150.
MOST_LINES = {"product": 50_650, "benchmarks": 7_950, "repository": 910}
# What tests the repository itself, and nothing that it installs.
OF_THE_REPOSITORY = ("architecture", "checks", "house", "layout", "words")

# For one token of eight streams; `python scripts/trace_request.py --calls --files` lists
# them. Resumed coroutines are calls, too.
MOST_CALLS = {"calls": 25.0, "resumed": 4.0}

# Modules below a package that users import or run, by its documentation.
PUBLIC_MODULES = {
    "lifecycle.debug",
    "lifecycle.events",
    "lifecycle.lowlevel",
    "lifecycle.shared",
    "lifecycle.testing",
    "lifecycle.testing.pytest_plugin",
    "lifecycle_asgi.events",
    "lifecycle_asgi.media",
    "lifecycle_asgi.opentelemetry",
    "lifecycle_asgi.prometheus",
    "lifecycle_asgi.request_scope",
    "lifecycle_asgi.uvicorn_protocol",
    "lifecycle_asgi.vllm_plugin",
    "lifecycle_asgi.sglang_plugin",
    "lifecycle_asgi.transformers_plugin",
    "lifecycle_asgi.litserve_plugin",
    "lifecycle_asgi.starlette",
    "lifecycle_asgi.testing",
    "lifecycle_engine.cli",
    "lifecycle_engine.worker",
    "lifecycle_tools.check",
    "lifecycle_tools.proxy",
    "lifecycle_tools.top",
}


def imported(path: Path, module: str) -> Iterator[str]:
    """Yield the modules of ours that a file imports, also for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                if path.name != "__init__.py":
                    package = package[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in SOURCES or base in SOURCES:
                    yield inner if inner in SOURCES else base


def test_has_no_import_cycle() -> None:
    """Imports never lead back to where they began, those of type checkers included."""
    graph = {module: {*imported(path, module)} for module, path in SOURCES.items()}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module] - {module}):
                walk(target, (*path, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_has_few_files() -> None:
    """The product is read in an evening: a bounded number of files."""
    files = [name for name, path in SOURCES.items() if path.name != "__init__.py"]
    tools = [name for name in files if name.partition(".")[0] in TOOLS]
    assert len(files) - len(tools) <= MOST_FILES
    assert len(tools) <= MOST_FILES_OF_TOOLS


def test_has_few_lines() -> None:
    """What there is to read and to keep grows with a reason only."""
    found = {
        "product": list(SOURCES.values()),
        "benchmarks": list((ROOT / "benchmarks").glob("*.py")),
        "repository": [ROOT / f"tests/test_{it}.py" for it in OF_THE_REPOSITORY],
    }
    counts = {
        name: sum(len(path.read_text().splitlines()) for path in paths)
        for name, paths in found.items()
    }
    over = [name for name, most in MOST_LINES.items() if counts[name] > most]
    assert over == [], counts


@pytest.mark.parametrize("module", SOURCES)
def test_has_short_files_and_functions(module: str) -> None:
    """No file and no function is longer than a reader can follow."""
    text = SOURCES[module].read_text()
    assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE
    long = [
        f"{node.name}, line {node.lineno}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []


def test_shadows_no_module_of_the_standard_library() -> None:
    """`inspect` or `http` in a traceback means the standard library."""
    names = {part for module in SOURCES for part in module.split(".")}
    assert names & set(sys.stdlib_module_names) == set()


def test_tests_use_public_names() -> None:
    """Most tests import what users import, so that internals may change."""
    inside = [
        path.relative_to(ROOT).as_posix()
        for path in TESTS
        if any(
            "." in module and module not in PUBLIC_MODULES
            for module in imported(path, "tests")
        )
    ]
    assert len(inside) <= MOST_TESTS_OF_INTERNALS, inside


def test_picture_of_the_imports_is_current() -> None:
    """The picture in CONTRIBUTING is drawn from the code as it is."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw_layout.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def traced(*options: str, seconds: float = 120) -> dict[str, Any]:
    """What the script that follows requests prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trace_request.py", "--json", *options],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_requests_enter_few_files() -> None:
    """To follow a request or a hang-up through a real server takes few files."""
    found = traced(seconds=1700)
    # Both processes were followed, to the model and back.
    for part in ("engine/server/generate.py", "model/transformers_runner.py"):
        assert any(part in file for file in found["text"]), part
    assert any("image_processor" in file for file in found["picture"])
    counts = {name: len(files) for name, files in found.items()}
    over = {
        name: found[name]
        for name, most in MOST_FILES_ENTERED.items()
        if counts[name] > most
    }
    assert over == {}, counts


def test_requests_enter_few_files_of_admission() -> None:
    """`Admission` in front of another server is read in a few files."""
    found = traced("--admission")["admission"]
    assert "adapters/lifecycle_asgi/admission.py" in found
    assert len(found) <= MOST_FILES_OF_ADMISSION, found


def test_tokens_take_few_calls() -> None:
    """What is done for each token is little, and no coroutine around it is resumed."""
    found = traced("--calls")
    assert {
        name: count for name, count in found.items() if count > MOST_CALLS[name]
    } == {}
