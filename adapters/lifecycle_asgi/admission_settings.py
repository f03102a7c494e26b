"""Settings of `Admission`, from arguments or from the environment of a server."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Literal, Self, TypedDict

from lifecycle.lowlevel import check_choice, check_int, check_seconds
from lifecycle_asgi.api_keys import GUARDED_PREFIXES
from lifecycle_asgi.media_memory import MediaProfile
from lifecycle_asgi.memory_limit import default_budget

_MAX_BODY: Final = 64 * 2**20
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B?)|B)?", re.ASCII)
_LEAST: Final = {"slots": 0, "per_client": 0, "media_slots": 1, "tensor_pixels": 1}
_SWITCHES: Final = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Settings of `Admission`.

    Each can be given to `Admission` by its name, or in the environment as the name in
    capitals with ``LIFECYCLE_`` in front of it: ``LIFECYCLE_BYTES=8GiB``.

    Attributes:
        bytes: Memory of all admitted requests together: bodies, decoded media and
            tensors, until the engine has them. Default: 4 GiB, or half of what the
            cgroup of the process may have, or the machine has, if that is less.
            ``"auto"`` begins there, and shrinks if requests take more than was thought.
        slots: Requests with a body that the application works on at once, until their
            responses are complete. ``None`` or 0: no limit.
        per_client: Requests with a body that one client may have in flight, until their
            responses are complete; of each worker. ``None`` or 0: no limit.
        media_slots: Requests with media that are decoded at once, until the engine has
            them. ``None``: as many as the bytes permit.
        release: When the bytes of a request come back: at ``"hand_off"``, which is the
            first bytes of a streamed response at the latest, or at its ``"end"``, for
            an application that has the media while it streams.
        order: ``"fair"`` lets clients take turns; ``"fifo"`` goes by arrival; so does
            ``"adaptive"``, until there has been a queue for *max_wait*: while it lasts,
            the newest goes first, and few wait for long.
        max_body: Maximum size of one body, in bytes; a sixteenth of all bytes at most.
        max_waiting: Maximum number of requests that wait in each lane.
        max_wait: Longest wait in a lane, in seconds.
        body_timeout: Seconds for one whole body.
        slow_after: Seconds after which a body that is not complete yet is charged with
            what has arrived, and no longer with its declared length.
        profile: What media cost the server: ``"vllm"``, ``"sglang"``, ``"lmdeploy"``,
            ``"proxy"``, ``"default"``, ``"pillow"`` for code that makes no tensors, a
            `MediaProfile`, or ``"auto"`` for that of the server whose package is
            imported.
        tensor_pixels: Pixels to which the model scales a larger image down, instead of
            what the profile says. ``None``: as in the profile, which for servers of any
            model is not at all.
        cancel_delay: Seconds between a disconnect and the cancellation of a request
            that does not wait for one. ``None``: 5 for SGLang, which looks every four
            seconds and then stops its engine, and 0 for other servers.
        api_keys: Keys that the server accepts, separated by commas in the environment.
            Requests that have a body and no such key are refused before the body is
            read. Empty: the keys of vLLM, if it is the server and has any.
        load_header: Add ``endpoint-load-metrics`` to each response: how full the lanes
            are, for load balancers that read ORCA reports. Every client sees it.
        metrics: Where Prometheus finds the metrics of the lanes: ``"server"`` for the
            registry of prometheus_client, which most servers show at their own
            ``/metrics``, or ``"PORT"`` or ``"HOST:PORT"`` for a listener of their own,
            by default on 127.0.0.1. Needs the extra ``observe``. ``None``: nowhere.
        shared: Folder that all workers of the server name, so that its bytes and slots
            are those of all of them together, as `lifecycle.shared.SharedGate` has
            them: of this user alone, and where nothing cleans up, such as below
            ``/run``. ``None``: each worker has its own.
        shadow: Refuse and delay no request, but count those that would have been, in
            ``over_limit`` of each lane: to try limits out on live traffic. Keys are
            asked for all the same.
        guarded_prefixes: Beginnings of the paths that the keys of vLLM guard. Keys in
            `api_keys` guard bodies, and WebSockets, on all paths.
    """

    bytes: int | Literal["auto"] = field(default_factory=default_budget)
    slots: int | None = None
    per_client: int | None = None
    media_slots: int | None = None
    release: Literal["hand_off", "end"] = "hand_off"
    order: Literal["fair", "fifo", "adaptive"] = "fair"
    max_body: int = _MAX_BODY
    max_waiting: int = 128
    max_wait: float = 20.0
    body_timeout: float = 60.0
    slow_after: float = 2.0
    profile: str | MediaProfile = "auto"
    tensor_pixels: int | None = None
    cancel_delay: float | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    guarded_prefixes: tuple[str, ...] = GUARDED_PREFIXES
    shadow: bool = False
    shared: str | None = None
    metrics: str | int | None = None
    load_header: bool = False

    def __post_init__(self) -> None:
        _check_bytes(self.bytes, self.shared)
        check_int(1, max_body=self.max_body)
        check_int(0, max_waiting=self.max_waiting)
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                check_int(least, **{name: getattr(self, name)})
        check_choice(("fair", "fifo", "adaptive"), order=self.order)
        check_choice(("hand_off", "end"), release=self.release)
        for name in ("shadow", "load_header"):
            if not isinstance(getattr(self, name), bool):  # "0" would count as true
                what = f"{name} must be True or False"
                raise TypeError(f"{what}, not {getattr(self, name)!r:.40}")
        _check_address(self.metrics)
        if self.body_timeout == 0:
            raise ValueError("body_timeout must be above 0 s, or no body is in time")
        if self.cancel_delay is not None:
            check_seconds(cancel_delay=self.cancel_delay)
        check_seconds(
            max_wait=self.max_wait,
            body_timeout=self.body_timeout,
            slow_after=self.slow_after,
        )
        keys: object = self.api_keys
        if isinstance(keys, str):
            raise TypeError("api_keys takes several keys: write (key,)")
        prefixes: object = self.guarded_prefixes
        if isinstance(prefixes, str):
            raise TypeError("guarded_prefixes takes several: write (prefix,)")

    @property
    def budget(self) -> int:
        """All bytes that requests may have: the largest budget, if it is learned."""
        return default_budget() if self.bytes == "auto" else self.bytes

    def largest_body(self, lane: int | None, copies: int, given: Container[str]) -> int:
        """Return what one body may have, and log if that is less than was asked for.

        Args:
            lane: Bytes of the lane of bodies, if they are limited.
            copies: Of a body, for which it has to have room.
            given: Lanes whose gates are not made of these settings.
        """
        if lane is None:
            return self.max_body
        largest = max(1, min(self.max_body, lane // copies))
        if largest < self.max_body != _MAX_BODY:
            own = "bodies" in given
            what, times = ("gate of bodies", copies) if own else ("budget", 16)
            logging.getLogger("lifecycle").warning(
                "Admission: bodies above %d bytes are refused, although max_body is "
                "%d; that takes a %s of %d bytes",
                largest,
                self.max_body,
                what,
                times * self.max_body,
            )
        return largest

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **options: Any) -> Self:
        """Return the settings of *environment*, replaced by *options*.

        Args:
            environment: Such as ``os.environ``; only ``LIFECYCLE_*`` is read.
            **options: Attributes of this class.

        Raises:
            TypeError: An option is unknown or of another type.
            ValueError: A value cannot be read or is out of range.
        """
        _warn_of_unknown(environment)
        found: dict[str, Any] = {}
        for name, read in _READERS.items():
            text = environment.get(f"LIFECYCLE_{name.upper()}")
            if text and name not in options:
                try:
                    found[name] = read(text)
                except (ValueError, KeyError):
                    raise ValueError(_unreadable(name, text)) from None
        return cls(**found, **options)


class AdmissionOptions(TypedDict, total=False):
    """The options of `Admission`, for type checkers; see `AdmissionSettings`."""

    bytes: int | Literal["auto"]
    slots: int | None
    per_client: int | None
    media_slots: int | None
    release: Literal["hand_off", "end"]
    order: Literal["fair", "fifo", "adaptive"]
    max_body: int
    max_waiting: int
    max_wait: float
    body_timeout: float
    slow_after: float
    profile: str | MediaProfile
    tensor_pixels: int | None
    cancel_delay: float | None
    api_keys: tuple[str, ...]
    guarded_prefixes: tuple[str, ...]
    shadow: bool
    shared: str | None
    metrics: str | int | None
    load_header: bool


def _check_bytes(nbytes: int | str, shared: str | None) -> None:
    if nbytes != "auto":
        check_int(1, bytes=nbytes)
    elif shared is not None:
        raise ValueError(
            f"bytes='auto' learns for one process, and shared={shared!r:.80} is for "
            f"several; give a number of bytes, such as LIFECYCLE_BYTES=8GiB"
        )


def _check_address(metrics: str | int | None) -> None:
    if metrics in (None, "server"):
        return
    port = str(metrics).rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        where = "'server', a port from 1 to 65535, or HOST:PORT"
        raise ValueError(f"metrics must be {where}, not {metrics!r:.40}")


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Say which variables set nothing: a misspelt limit is none."""
    for variable in sorted(environment):
        prefix, _, name = variable.partition("_")
        if prefix == "LIFECYCLE" and name.lower() not in _READERS:
            near = difflib.get_close_matches(name.lower(), _READERS, n=1)
            hint = f"; did you mean {prefix}_{near[0].upper()}?" if near else ""
            what = "%.80s is no setting of Admission, and is ignored%s"
            logging.getLogger("lifecycle").warning(what, variable, hint)


def _unreadable(name: str, text: str) -> str:
    example = _EXAMPLES.get(_READERS[name], "a number such as 20")
    return f"LIFECYCLE_{name.upper()} must be {example}, not {text[:40]!r}"


def parse_size(text: str) -> int:
    """Return the bytes of ``2GiB`` or ``2G``, of ``2GB``, which is less, or of digits.

    Raises:
        ValueError: The text is no size.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None:
        raise ValueError("no size")
    number, letter, rest = found.groups(default="")
    unit = 1000 if rest == "B" else 1024
    return int(Decimal(number) * unit ** " KMGT".index(letter or " "))


def _read_bytes(text: str) -> int | str:
    return "auto" if text.strip().lower() == "auto" else parse_size(text)


def _read_switch(text: str) -> bool:
    return _SWITCHES[text.strip().lower()]


def _read_list(text: str) -> tuple[str, ...]:
    items = tuple(item for each in text.split(",") if (item := each.strip()))
    if not items:
        raise ValueError("no items")
    return items


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "bytes": _read_bytes,
    "slots": int,
    "per_client": int,
    "media_slots": int,
    "release": str,
    "order": str,
    "max_body": parse_size,
    "max_waiting": int,
    "max_wait": float,
    "body_timeout": float,
    "slow_after": float,
    "profile": str,
    "tensor_pixels": int,
    "cancel_delay": float,
    "api_keys": _read_list,
    "guarded_prefixes": _read_list,
    "shadow": _read_switch,
    "shared": str,
    "metrics": str,
    "load_header": _read_switch,
}

_EXAMPLES: Final[Mapping[Callable[[str], Any], str]] = {
    _read_bytes: "a number such as 8GiB, or auto",
    parse_size: "a number such as 8GiB",
    _read_switch: "1 or 0",
    _read_list: "a list such as a,b",
}
