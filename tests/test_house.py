"""The size and the manners of the core, measured from its own source.

A core that is read in an afternoon is one that can be trusted. What is counted are
lines as they stand in the files, with documentation and blank ones.
"""

import ast
import importlib
import inspect
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lifecycle

# The aim is 2,400. It went up once, by 110: starts in plain tasks, watched by one
# watchdog, take 37 us where they took 64.
MOST_LINES = 4100
MOST_LINES_OF_TESTING = 1300
MOST_LINES_OF_A_FILE = 320
MOST_LINES_OF_NINE_FUNCTIONS_IN_TEN = 25
MOST_NAMES = 24

CORE = Path(__file__).resolve().parents[1] / "src" / "lifecycle"
FILES = sorted(CORE.rglob("*.py"))
TESTING = sorted((CORE / "testing").rglob("*.py"))
MODULES = ["lifecycle", *(f"lifecycle.{name}" for name in ("events", "inspect"))]
MODULES += ["lifecycle.observers", "lifecycle.testing"]


def lines(files: list[Path]) -> int:
    """Return how many lines *files* have in all."""
    return sum(len(path.read_text().splitlines()) for path in files)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file, however deep."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the public classes and functions of a module, and their methods."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    for name in names:
        thing = getattr(module, name)
        ours = str(getattr(thing, "__module__", "")).startswith("lifecycle")
        if ours and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                yield from methods(f"{module.__name__}.{name}", thing)


def methods(name: str, kind: type) -> Iterator[tuple[str, object]]:
    """Yield what a class of ours defines itself under a public name."""
    for attribute, value in vars(kind).items():
        found = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if not attribute.startswith("_") and inspect.isfunction(found):
            yield f"{name}.{attribute}", found


PUBLIC = {
    name: thing
    for module in map(importlib.import_module, MODULES)
    for name, thing in public(module)
}


def raises(thing: object) -> bool:
    """Whether a function, or the making of an instance, has a ``raise`` of its own."""
    made = vars(thing).get("__init__") if inspect.isclass(thing) else thing
    if not inspect.isfunction(made) or made.__code__.co_filename == "<string>":
        return False
    pending = list(ast.parse(textwrap.dedent(inspect.getsource(made))).body[0].body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return False


def doc(name: str) -> str:
    """Return what somebody has written about a public name."""
    text = PUBLIC[name].__doc__ or ""
    # A dataclass without any makes up its signature.
    return "" if text.startswith(f"{name.rpartition('.')[2]}(") else text


def without(section: str, names: list[str]) -> list[str]:
    """Return those of the public *names* whose docstring lacks a section."""
    return [name for name in names if section not in doc(name)]


def test_is_a_small_core() -> None:
    """The primitives are few lines, and so is what is there to test with."""
    assert lines([path for path in FILES if path not in TESTING]) <= MOST_LINES
    assert lines(TESTING) <= MOST_LINES_OF_TESTING


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_has_no_long_file(path: Path) -> None:
    """A file is one concept, and fits into a head."""
    assert lines([path]) <= MOST_LINES_OF_A_FILE


def test_has_short_functions() -> None:
    """Nine functions in ten fit onto a screen, documentation included."""
    lengths = {
        f"{path.name}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in functions(path)
    }
    longest = sorted(lengths, key=lambda name: -lengths[name])[:10]
    p90 = statistics.quantiles(lengths.values(), n=10)[-1]
    assert p90 <= MOST_LINES_OF_NINE_FUNCTIONS_IN_TEN, longest


def test_has_few_names() -> None:
    """What users must learn is a list of this length."""
    assert len(lifecycle.__all__) <= MOST_NAMES


def test_documents_every_public_name() -> None:
    """Each class, function, method and property that users see says what it is."""
    assert [name for name in PUBLIC if not doc(name)] == []


def test_says_what_cancellation_does() -> None:
    """Each coroutine that users await says what becomes of it when it is cancelled."""
    names = [name for name in PUBLIC if inspect.iscoroutinefunction(PUBLIC[name])]
    assert names
    assert without("Cancellation:", names) == []


def test_names_what_is_raised() -> None:
    """Whatever raises by itself names it, the class for what its making raises."""
    names = [name for name in PUBLIC if raises(PUBLIC[name])]
    assert names
    assert without("Raises:", names) == []
