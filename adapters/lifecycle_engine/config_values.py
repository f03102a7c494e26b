"""Types of configuration values: what pydantic checks, and how users see it.

Options and environment variables are text, TOML and Python values have a type; both
are accepted wherever they mean the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin


def to_toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    plain = value if isinstance(value, int) else str(value)
    return json.dumps(plain, ensure_ascii=False)


def brief(value: object, words: Callable[[Any], str] = repr) -> str:
    """Return a value as errors show it: of a long one, the two ends."""
    try:
        text = words(value)
    except ValueError:  # of a number of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 160 else f"{text[:100]}...{text[-20:]}"


@dataclass(frozen=True, slots=True)
class Form:
    """Of a type: what stands for it in ``--help``, and what pydantic is to check.

    Attributes:
        metavar: What stands for a value in ``--help``.
        read: What text means, for pydantic to check. A `ValueError` has the remedy.
        show: Returns a value as TOML.
        secret: Whether neither errors nor ``--print-config`` may show it.
        remedy: What to give, where pydantic's words leave it open.
        ge, gt, le, lt: Limits, as of pydantic's ``Field``.
    """

    metavar: str
    read: Callable[[str], Any] = str
    show: Callable[[Any], str] = to_toml
    secret: bool = False
    remedy: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @classmethod
    def of(cls, kind: Any) -> Form:
        """Return that of a type below, of words, or of true and false."""
        if get_origin(kind) is Literal:
            return cls(f"[{'|'.join(get_args(kind))}]")
        flag = cls("", remedy="; give true or false")
        return flag if kind is bool else kind.__metadata__[0]

    def parse(self, kind: Any, value: Any) -> Any:
        """Return the checked value: text as it can be read, else of that very type.

        Raises:
            ValueError: With the value, unless it is secret, the limit and the remedy.
        """
        from pydantic import Field, TypeAdapter, ValidationError  # not for --help

        limits = Field(ge=self.ge, gt=self.gt, le=self.le, lt=self.lt)
        text = isinstance(value, str)
        try:
            found = self.read(value) if text else value
            return TypeAdapter(Annotated[kind, limits]).validate_python(
                found, strict=not text
            )
        except ValidationError as error:
            problem = error.errors()[0]["msg"] + self.remedy
        except ValueError as error:
            problem = str(error)
        shown = "a key" if self.secret else brief(value)
        raise ValueError(f"{shown} is refused: {problem[0].lower()}{problem[1:]}")


def items_of(value: Any) -> Sequence[Any]:
    """Return the items of a list, which text has commas between.

    Raises:
        ValueError: It is no list, or a text without items.
    """
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",") if each.strip()]
        if not value:
            raise ValueError("it lists nothing; leave it out, or name something")
    of_bytes = isinstance(value, bytes | bytearray | memoryview)
    if isinstance(value, Sequence) and not of_bytes:
        return value
    raise ValueError(f"{type(value).__name__} is not a list; give one")


def _read_size(text: str) -> int:
    from lifecycle_asgi.admission_settings import parse_size  # not for --help

    with suppress(ValueError):
        return parse_size(text)
    raise ValueError("give a size in bytes, KiB, MiB, GiB or TiB, as 2GiB")


def _show_size(value: int) -> str:
    """Return the size in the largest unit that divides it."""
    for power, letter in reversed([*enumerate("KMGT", 1)]):
        if value and value % 1024**power == 0:
            return json.dumps(f"{value // 1024**power}{letter}iB")
    return str(value)


def _read_text(text: str) -> str:
    if not text:
        raise ValueError("give a text that is not empty")
    return text


def _read_secret(text: str) -> str:
    # What a header can carry, and no spaces: they would part it from its scheme.
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("a key has 1 or more printable ASCII characters, no space")
    return text


def _read_function(text: str) -> str:
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise ValueError("give a function, as package.module:name")
    return text


def _read_drafts(text: str) -> str:
    if text != "ngram" and text.removeprefix("draft=") in ("", text):
        # In the words of the engine, which comes to it without a server, too.
        what = "use ngram, or draft=FOLDER with the checkpoint of a smaller model"
        raise ValueError(what)
    return text


def _read_network(text: str) -> str:
    # A name would match no address, and all clients would count as one.
    with suppress(ValueError):
        ip_network(text)
        return text
    raise ValueError("give an address, or a network as 10.0.0.0/8")


def _read_listener(text: str) -> str:
    if text != "off" and not (text.startswith("unix:") and len(text) > 5):
        split_address(text)
    return text


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, where an IPv6 address has brackets.

    Raises:
        ValueError: It has another form.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not re.fullmatch("[0-9]+", port) or (":" in host and not bracketed):
        raise ValueError("give HOST:PORT, unix:PATH or off")
    number = int(port.lstrip("0")[:6] or 0)  # six digits are too many
    if number > 65535:
        raise ValueError("give a port of 0 to 65535")
    return host.strip("[]"), number


_SIZE = Form("SIZE", _read_size, _show_size, ge=0)

Whole = Annotated[int, Form("N", ge=0)]
Count = Annotated[int, Form("N", ge=1)]
Amount = Annotated[float, Form("N", ge=0, lt=float("inf"))]
Seconds = Annotated[float, Form("SECONDS", ge=0)]
"""``inf`` is no limit."""
Timeout = Annotated[float, Form("SECONDS", gt=0, remedy="; inf is no limit")]
Size = Annotated[int, _SIZE]
"""A number of bytes, as ``2GiB`` or in digits."""
SomeBytes = Annotated[int, replace(_SIZE, ge=1)]
Text = Annotated[str, Form("TEXT", _read_text)]
Drafts = Annotated[str, Form("ngram|draft=FOLDER", _read_drafts)]
Secret = Annotated[str, Form("KEY", _read_secret, secret=True)]
Function = Annotated[str, Form("MODULE:NAME", _read_function)]
"""The name of a function; its module is imported when the server is made."""
FilePath = Annotated[Path, Form("PATH", _read_text, remedy="; give a text")]
"""A file or folder; whether it exists is seen when it is used."""
Network = Annotated[str, Form("ADDRESS", _read_network)]
Listener = Annotated[str, Form("HOST:PORT", _read_listener)]
