"""Checks of arguments and options: value, limit and remedy in the message."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Collection
from inspect import CO_VARARGS
from numbers import Real
from types import CodeType, UnionType
from typing import Any, Final, NoReturn


class _Unstated(int):
    """A default of 0 that can be told from a 0 that was named."""

    def __repr__(self) -> str:
        return "0"


UNSTATED: Final = _Unstated()


class _Unchanged:
    """A default that differs from ``None`` and reads well in ``help()``."""

    def __repr__(self) -> str:
        return "<unchanged>"


UNCHANGED: Final[Any] = _Unchanged()


def brief(number: object) -> str:
    """Return a number as errors show it: of a long one, the two ends."""
    try:
        text = str(number)
    except ValueError:  # of thousands of digits
        return f"a huge {type(number).__name__}"
    return text if len(text) <= 160 else f"{text[:100]}...{text[-20:]}"


def _no_float(name: str, value: object) -> ValueError:
    what = f"{name} must be seconds that a float can hold, not {brief(value)}"
    return ValueError(f"{what}; give math.inf for no limit")


def check_amount(name: str, value: object) -> int:
    """Return *value* if it is a whole number of 0 or more.

    Raises:
        ValueError: It is not; a bool is none. Fractions and NaN are refused because
            sums of them do not return to zero.
    """
    if type(value) is int and value >= 0:  # nearly always, in each request
        return value
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        kind = type(value).__name__
        raise ValueError(f"{name} must be a whole number, not {kind}")
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, not {brief(number)}")
    return number


def check_capacity(name: str, value: object) -> float:
    """Return *value* as a capacity: a whole number, or infinity for none."""
    unlimited = value is None or value is UNCHANGED
    return math.inf if unlimited else check_amount(name, value)


def check_cost(slots: object, nbytes: object) -> tuple[int, int]:
    """Return a request's cost. A zero cost is almost always a mistake: refused."""
    size = 0 if nbytes is UNSTATED else check_amount("bytes", nbytes)
    cost = check_amount("slots", slots), size
    if cost == (0, 0):
        raise ValueError("a request must cost at least one slot or one byte")
    return cost


def check_deadline(name: str, value: float, or_none: str = "") -> float:
    """Return *value*, which may be added to a clock's time: any number but NaN.

    A negative one is what was left of a deadline that has passed.
    """
    requirement = f"{name} must be a number of seconds{or_none}, not"
    try:
        if not (math.isnan(value) or isinstance(value, bool)):
            return value if isinstance(value, int) else float(value)
    except TypeError:
        raise TypeError(f"{requirement} {type(value).__name__}") from None
    except OverflowError:
        raise _no_float(name, value) from None
    if isinstance(value, bool):
        raise TypeError(f"{requirement} bool")
    raise ValueError(f"{requirement} NaN")


def check_deadline_or_none(name: str, value: float | None) -> float | None:
    """Return *value* if it is a number of seconds or ``None``."""
    return None if value is None else check_deadline(name, value, " or None")


def check_limit(name: str, value: float, or_none: str = "") -> float:
    """Return *value*, a limit for all that comes: a deadline of 0 seconds or more."""
    seconds = check_deadline(name, value, or_none)
    if seconds < 0:
        what = f"{name} must be 0 or more seconds{or_none}"
        raise ValueError(f"{what}, not {brief(value)}")
    return seconds


def check_limit_or_none(name: str, value: float | None) -> float | None:
    """Return *value* if it is a limit in seconds or ``None``."""
    return None if value is None else check_limit(name, value, " or None")


def check(met: bool, requirement: str, given: object) -> None:  # noqa: FBT001
    """Raise `TypeError` unless *met*: the *requirement*, and the type of *given*."""
    if not met:
        raise TypeError(f"{requirement}, not {type(given).__name__}")


def check_type(
    types: type | UnionType | tuple[type, ...], requirement: str, given: object
) -> None:
    """Raise `TypeError` unless *given* is of one of *types*."""
    check(isinstance(given, types), requirement, given)


def check_callable(**options: object) -> None:
    """Raise `TypeError` unless each option can be called."""
    for name, value in options.items():
        check(callable(value), f"{name} must be callable", value)


def name_of(function: object) -> str:
    """Return how an error names *function*, or what a partial calls."""
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", type(function).__name__)


def takes_one(function: object) -> bool:
    """Whether *function* can be called with one argument, as far as its code tells.

    A signature would tell of partials and classes, too, and costs as much as a start.
    """
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code.co_flags & CO_VARARGS:
        return True
    called: Any = function
    most = code.co_argcount - hasattr(called, "__self__")
    least = most - len(called.__defaults__ or ())
    by_name = code.co_kwonlyargcount - len(called.__kwdefaults__ or ())
    return least <= 1 <= most and not by_name


def check_bool(**options: object) -> None:
    """Raise `TypeError` for anything but True and False, such as the text ``"no"``."""
    for name, value in options.items():
        check(isinstance(value, bool), f"{name} must be True or False", value)


def check_int(minimum: int = 0, /, **options: object) -> None:
    """Raise unless each option is a whole number of at least *minimum*.

    Raises:
        TypeError: One is no whole number; a bool is none.
        ValueError: One is less than *minimum*.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            kind = type(value).__name__
            raise TypeError(f"{name} must be a whole number, not {kind}")
        if value.__index__() < minimum:
            raise ValueError(f"{name} must be {minimum} or more, not {brief(value)}")


def check_seconds(**options: object) -> None:
    """Raise unless each option is a number of 0 or more; infinity is one.

    Raises:
        TypeError: One is no number; a bool is none.
        ValueError: One is negative or NaN.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            kind = type(value).__name__
            raise TypeError(f"{name} must be a number of seconds, not {kind}")
        try:
            valid = float(value) >= 0
        except OverflowError:
            raise _no_float(name, value) from None
        if not valid:
            what = f"{name} must be 0 seconds or more"
            raise ValueError(f"{what}, not {brief(value)}")


def check_choice(choices: Collection[object], /, **options: object) -> None:
    """Raise unless each option is one of *choices*.

    Raises:
        ValueError: One is not.
    """
    for name, value in options.items():
        if value not in choices:
            listed = ", ".join(map(str, choices))
            raise ValueError(f"{name} must be one of {listed}, not {value!r}")


def check_order(order: object, reserve: object, max_wait: object) -> None:
    """Raise unless there is such an *order*, with what goes with it.

    Raises:
        TypeError: *reserve* is no number; a bool is none.
        ValueError: There is no such order, *reserve* is out of range, or the order
            knows no keys, or needs *max_wait*.
    """
    check_choice(("fifo", "fair", "adaptive"), order=order)
    if isinstance(reserve, bool) or not isinstance(reserve, Real):
        raise TypeError(f"reserve must be a number, not {type(reserve).__name__}")
    if reserve < 0 or not reserve < 1:  # NaN is neither
        raise ValueError(f"reserve must be from 0 to below 1, not {brief(reserve)}")
    if reserve and order != "fair":
        what = "reserve must be 0 unless order='fair'"
        raise ValueError(f"{what}, not {brief(reserve)}")
    if max_wait is None and order == "adaptive":
        raise ValueError("order='adaptive' needs the longest wait; give max_wait")


def check_priority(priority: object) -> None:
    """Raise `ValueError` unless *priority* is a whole number, of either sign."""
    if not isinstance(priority, int):
        what = f"priority must be a whole number, not {type(priority).__name__}"
        raise ValueError(what)  # noqa: TRY004 - as of slots and bytes


class NoCopy:
    """Base class for objects with identity: copying and pickling raise TypeError."""

    __slots__ = ()

    def __reduce__(self) -> str | tuple[Any, ...]:
        kind = type(self).__name__
        raise TypeError(f"a {kind} cannot be pickled or copied; pass it on as it is")

    def _warn(self, message: str) -> None:
        warnings.warn(message, ResourceWarning, stacklevel=3, source=self)


def made_by(owner: str) -> Callable[..., NoReturn]:
    """Return a ``__new__`` for a class of which *owner* makes the objects."""

    def refuse(cls: type, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"a {cls.__name__} is not made by its class: use {owner}")

    return refuse
