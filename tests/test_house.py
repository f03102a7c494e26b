"""What users of the core are shown: a short list of names, all of them documented."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType

import lifecycle

MOST_NAMES = 26

PUBLIC_MODULES = ("events", "debug", "lowlevel", "shared", "testing")
MODULES = ["lifecycle", *(f"lifecycle.{name}" for name in PUBLIC_MODULES)]


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
    """Return the documentation of a public name."""
    text = PUBLIC[name].__doc__ or ""
    # A dataclass without any makes up its signature.
    return "" if text.startswith(f"{name.rpartition('.')[2]}(") else text


def without(section: str, names: list[str]) -> list[str]:
    """Return those of the public *names* whose docstring lacks a section."""
    return [name for name in names if section not in doc(name)]


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
