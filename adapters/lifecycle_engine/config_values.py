"""Kinds of configuration values: each parses text or TOML, checks limits and prints.

Options and environment variables are text, TOML and Python values have a type; both
are accepted wherever they mean the same.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, ClassVar

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Kind(ABC):
    """What a value has to be."""

    __slots__ = ()

    @property
    @abstractmethod
    def metavar(self) -> str:
        """What stands for the value in ``--help``."""

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """Return the checked value.

        Raises:
            ValueError: With the value, the limit and the remedy.
        """

    def show(self, value: Any) -> str:
        """Return a value as TOML; `parse` reads it back."""
        plain = value if isinstance(value, int) else str(value)
        return json.dumps(plain, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number."""

    least: int = 0
    most: int | None = None
    metavar: str = "N"

    def parse(self, value: Any) -> int:
        """Return the checked number."""
        number = value
        if isinstance(value, str):
            number = int(value) if re.fullmatch(r"[+-]?[0-9]+", value) else None
        if type(number) is not int:
            raise _not(value, "a whole number")
        _check_range(number, self.least, self.most)
        return number


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number."""

    least: float = 0
    metavar: str = "N"
    infinite: ClassVar[bool] = False

    def parse(self, value: Any) -> float:
        """Return the checked number."""
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                number = None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _not(value, "a number")
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            raise _not(value, "a finite number")
        _check_range(number, self.least)
        return float(number)

    def show(self, value: float) -> str:
        """Return the digits."""
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)


@dataclass(frozen=True, slots=True)
class Seconds(Number):
    """A duration in seconds; ``inf`` is no limit."""

    metavar: str = "SECONDS"
    infinite: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Timeout(Seconds):
    """A time limit in seconds, more than 0; ``inf`` is no limit."""

    least: float = -math.inf

    def parse(self, value: Any) -> float:
        """Return the checked number."""
        # No super() without arguments: slots make the decorator replace the class.
        seconds = Seconds.parse(self, value)
        if seconds <= 0:
            raise ValueError(
                f"{seconds:g} is not more than 0; give more, or inf for no limit"
            )
        return seconds


@dataclass(frozen=True, slots=True)
class Size(Kind):
    """A number of bytes, as ``2GiB`` or in digits."""

    least: int = 0
    metavar: str = "SIZE"

    def parse(self, value: Any) -> int:
        """Return the checked number of bytes."""
        size = value
        if isinstance(value, str):
            from lifecycle_asgi.admission_settings import parse_size  # not for --help

            with suppress(ValueError):
                size = parse_size(value)
        if type(size) is not int:
            raise _not(value, "a size in bytes, KiB, MiB, GiB or TiB, as 2GiB")
        _check_range(size, self.least)
        return size

    def show(self, value: int) -> str:
        """Return the size in the largest unit that divides it."""
        for power, letter in reversed([*enumerate("KMGT", 1)]):
            if value and value % 1024**power == 0:
                return json.dumps(f"{value // 1024**power}{letter}iB")
        return str(value)


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text that is not empty."""

    metavar: str = "TEXT"

    def parse(self, value: Any) -> str:
        """Return the text."""
        if not isinstance(value, str) or not value:
            raise _not(value, "a text")
        return value


@dataclass(frozen=True, slots=True)
class Secret(Kind):
    """A key: neither an error nor ``--print-config`` shows it."""

    metavar: str = "KEY"

    def parse(self, value: Any) -> str:
        """Return the key."""
        # What a header can carry, and no spaces: they would part it from its scheme.
        if not isinstance(value, str) or not re.fullmatch(r"[!-~]+", value):
            raise ValueError("a key has 1 or more printable ASCII characters, no space")
        return value

    def show(self, value: str) -> str:
        """Return nothing."""
        del value
        return ""


@dataclass(frozen=True, slots=True)
class Function(Kind):
    """The name of a function in a module; imported when the server is made."""

    metavar: str = "MODULE:NAME"

    def parse(self, value: Any) -> str:
        """Return the name."""
        module, colon, name = (
            value.partition(":") if isinstance(value, str) else ("",) * 3
        )
        parts = [*module.split("."), name]
        if not colon or not all(part.isidentifier() for part in parts):
            raise _not(value, "a function, as package.module:name")
        return str(value)


@dataclass(frozen=True, slots=True)
class FilePath(Kind):
    """A path of a file or folder; whether it exists is seen when it is used."""

    metavar: str = "PATH"

    def parse(self, value: Any) -> Path:
        """Return the path."""
        if not isinstance(value, str | Path) or not str(value):
            raise _not(value, "a path")
        return Path(value)


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of some words."""

    words: tuple[str, ...]

    @property
    def metavar(self) -> str:
        """The words."""
        return f"[{'|'.join(self.words)}]"

    def parse(self, value: Any) -> str:
        """Return the word."""
        if value not in self.words:
            raise ValueError(f"{value!r} is unknown; give {' or '.join(self.words)}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """True or false."""

    metavar: str = ""

    def parse(self, value: Any) -> bool:
        """Return the flag."""
        if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        if not isinstance(value, bool):
            raise _not(value, "a value of true or false")
        return value


@dataclass(frozen=True, slots=True)
class Network(Kind):
    """An IP address, or a network as ``10.0.0.0/8``."""

    metavar: str = "ADDRESS"

    def parse(self, value: Any) -> str:
        """Return the address as it was written."""
        # A name would match no address, and all clients would count as one.
        try:
            ip_network(value if isinstance(value, str) else "")
        except ValueError:
            raise _not(value, "an address, or a network as 10.0.0.0/8") from None
        return str(value)


@dataclass(frozen=True, slots=True)
class Listener(Kind):
    """An address to listen on, ``unix:PATH`` of a socket, or ``off``."""

    metavar: str = "HOST:PORT"

    def parse(self, value: Any) -> str:
        """Return the address as it was written."""
        text = value if isinstance(value, str) else ""
        if text != "off" and not (text.startswith("unix:") and len(text) > 5):
            split_address(text)
        return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to *host*."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, where an IPv6 address has brackets.

    Raises:
        ValueError: It has another form.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not re.fullmatch("[0-9]+", port) or (":" in host and not bracketed):
        raise ValueError(f"{address!r} is not HOST:PORT, unix:PATH or off; give one")
    _check_range(int(port), 0, 65535)
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class Many(Kind):
    """A list; in an environment variable, the items are separated by commas."""

    item: Kind

    @property
    def metavar(self) -> str:
        """That of an item."""
        return self.item.metavar

    def parse(self, value: Any) -> tuple[Any, ...]:
        """Return the checked items."""
        if isinstance(value, str):
            value = [each.strip() for each in value.split(",") if each.strip()]
            if not value:
                raise ValueError("it lists nothing; leave it out, or name something")
        if not isinstance(value, Sequence) or isinstance(value, bytes | Mapping):
            hidden = isinstance(self.item, Secret)
            raise _not(type(value).__name__ if hidden else value, "a list")
        return tuple(self.item.parse(each) for each in value)

    def show(self, value: Sequence[Any]) -> str:
        """Return the items in brackets."""
        shown = [self.item.show(each) for each in value]
        return f"[{', '.join(shown)}]" if all(shown) else ""


def _not(value: Any, what: str) -> ValueError:
    return ValueError(f"{value!r} is not {what}; give one")


def _check_range(value: float, least: float, most: float | None = None) -> None:
    if most is not None and not least <= value <= most:
        raise ValueError(f"{value} is out of range; give {least} to {most}")
    if value < least:
        raise ValueError(f"{value} is less than {least}; give {least} or more")
