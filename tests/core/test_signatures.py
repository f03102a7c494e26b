"""What each public callable promises by its signature, whatever it does."""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import lifecycle
import lifecycle.debug
import lifecycle.events
import lifecycle.lowlevel

MODULES = (lifecycle, lifecycle.debug, lifecycle.events, lifecycle.lowlevel)
# They are what the call is about, and read well without a name.
POSITIONAL = {
    "Gate(_bare)",
    "LoopWaiter(like)",
    "Session.close(outcome)",
    "Session.stop(outcome)",
    "SessionRegistry.close_all(outcome)",
    "SessionRegistry.get(id_)",
    "Stream.stop(error)",
    "check_int(minimum)",
    "in_thread(function)",
    "managed(_bare)",
    "structlog_observer(logger)",
}
# In seconds, bytes or times; what documentation and users rely on.
NUMBERS = {
    "Gate(reserve)": 0.0,
    "Gate.admit(bytes)": 0,
    "Gate.admit(priority)": 0,
    "Gate.admit(slots)": 1,
    "Gate.try_admit(bytes)": 0,
    "Gate.try_admit(priority)": 0,
    "Gate.try_admit(slots)": 1,
    "Held(bytes)": 0,
    "Held(slots)": 0,
    "Payload(nbytes)": 0,
    "Session.box(nbytes)": 0,
    "Session.start(timeout)": 30.0,
    "Session.start_all(timeout)": 30.0,
    "Session.stream(grace)": 5.0,
    "SessionRegistry(end_timeout)": 5.0,
    "SessionRegistry(max_quarantined)": 1000,
    "Stream(grace)": 5.0,
    "check_int(minimum)": 0,
    "managed(cost)": 0,
    "managed(slots)": 1,
    "who_holds(hops)": 6,
}


def public(module: ModuleType) -> list[tuple[str, Any]]:
    """Return public classes and functions of the library, by name."""
    names = getattr(module, "__all__", list(vars(module)))
    found = [(name, getattr(module, name)) for name in names if name[0] != "_"]
    return [
        (name, each)
        for name, each in found
        if str(getattr(each, "__module__", "")).startswith("lifecycle")
        and callable(each)
    ]


def callables() -> dict[str, Callable[..., Any]]:
    """Return them with their methods."""
    found: dict[str, Callable[..., Any]] = {}
    for name, each in (pair for module in MODULES for pair in public(module)):
        if inspect.isfunction(each) or "__init__" in vars(each):
            found[name] = each
        methods = vars(each).items() if inspect.isclass(each) else ()
        for method, function in methods:
            if method[0] != "_" and inspect.isfunction(function):
                found[f"{name}.{method}"] = function
    return found


def parameters() -> dict[str, inspect.Parameter]:
    """Return all parameters that users see, as in ``Gate.admit(slots)``."""
    return {
        f"{name}({each.name})": each
        for name, function in callables().items()
        for each in inspect.signature(function).parameters.values()
        if each.name == "_bare" or each.name[0] != "_"
    }


def test_takes_options_by_name_only() -> None:
    """All that has a default is an option, but for what the call is about."""
    optional = {
        name: each
        for name, each in parameters().items()
        if each.default is not inspect.Parameter.empty
    }
    assert len(optional) > 50
    by_name = {n for n, p in optional.items() if p.kind is p.KEYWORD_ONLY}
    assert set(optional) - by_name == POSITIONAL


def test_takes_by_place_or_name_what_is_required() -> None:
    """Few functions say that a parameter has no name."""
    nameless = {n for n, p in parameters().items() if p.kind is p.POSITIONAL_ONLY}
    assert nameless == {
        "Gate(_bare)",
        "check_choice(choices)",
        "check_int(minimum)",
        "in_thread(function)",
        "managed(_bare)",
    }


def test_has_the_numbers_that_are_documented() -> None:
    """A default that changes is a change that users see."""
    numbers = {
        name: each.default
        for name, each in parameters().items()
        if isinstance(each.default, int | float) and each.default is not True
    }
    assert numbers == NUMBERS
    assert inspect.signature(lifecycle.Gate).parameters["enforce"].default is True


@pytest.mark.parametrize(
    "kind",
    [
        each
        for module in (lifecycle, lifecycle.debug, lifecycle.events)
        for _name, each in public(module)
        if dataclasses.is_dataclass(each) and each is not lifecycle.Session
    ],
)
def test_reports_by_frozen_values(kind: Any) -> None:
    """Statistics, events and findings cannot be changed, and are made by name."""
    fields = dataclasses.fields(kind)
    value = kind(**{each.name: 1 for each in fields})
    assert not hasattr(value, "__dict__")
    assert value == kind(**{each.name: 1 for each in fields})
    for each in fields:
        assert each.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, each.name, 2)
