"""Common mistakes raise at once, with the remedy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import Payload
from lifecycle_zmq import (
    Arena,
    ArenaView,
    EngineClient,
    EngineFailed,
    EngineLoop,
    EngineServer,
    Finish,
    GeneratorBackend,
    Output,
    RequestRejected,
    Restarts,
    SupervisedEngine,
    Supervisor,
    ThreadEngine,
    ZmqEngine,
)

pytestmark = pytest.mark.anyio


class Once:
    """A backend that gives one item to each stream."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self.keys)

    def start(self, key: str, request: Any, tensors: Any) -> Any:
        self.keys.append(key)
        return request.get("merge")

    def cancel(self, key: str) -> None: ...

    def end(self, key: str) -> None:
        self.keys = [other for other in self.keys if other != key]

    def step(self) -> list[Output]:
        keys, self.keys = self.keys, []
        return [Output(key, [[1]], Finish("completed")) for key in keys]

    def status(self) -> dict[str, Any]:
        return {"keys": len(self.keys)}


def without(name: str) -> object:
    """A backend that lacks *name*."""
    names = ("start", "cancel", "end", "step", "status", "busy")
    return type("Half", (), {n: vars(Once)[n] for n in names if n != name})()


def print_key(_backend: object, _key: str) -> None: ...


def named(name: str, value: object) -> object:
    """A backend that has *value* where an optional method may be."""
    return type("Named", (Once,), {name: value})()


class Spinning(Once):
    def busy(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (without("status"), "Half is no Backend: it has no method status"),
        (without("busy"), "Half is no Backend: it has no property busy"),
        (Once, r"Once is no Backend: it is a class; make one: Once\(\)"),
        (Spinning(), "Spinning is no Backend: busy is a method, which is always true"),
        (named("started", 0), "Named is no Backend: its started is not the optional"),
        (named("ending", lambda _: True), "Named is no .* takes 1 argument; rename it"),
        (named("drive", print_key), "Named is no .* takes 3 arguments; rename it"),
    ],
)
def test_names_what_a_backend_lacks(backend: Any, words: str) -> None:
    """A wrong backend raises before the first request, and `busy` never spins."""
    with pytest.raises(TypeError, match=f"^{words}"):
        EngineLoop(backend, incarnation=1)


@functools.wraps(lambda _backend, _injected, _key: None)
def injects(_backend: object, _key: str) -> None: ...


@pytest.mark.parametrize("hook", [None, print_key, lambda *_: None, min, injects])
def test_takes_hooks_of_any_kind(hook: object) -> None:
    """A hook that is there, or is ``None``, or of which the arguments are not known."""
    EngineLoop(named("pause", hook), incarnation=1)  # type: ignore[arg-type]


def test_refuses_incarnation_that_is_text() -> None:
    """As it comes on the command line it would answer to no client, for ever."""
    with pytest.raises(TypeError, match=r"must be an int, not str; give int\(\) of it"):
        EngineLoop(Once(), incarnation="1")  # type: ignore[arg-type]


OTHERS: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (ZmqEngine, {"argv": "python engine.py"}, "argv must be a list, not str; shlex"),
    (ZmqEngine, {"argv": 5}, "argv must be a list, not int"),
    (ZmqEngine, {"argv": []}, "argv is empty; name a program"),
    (ZmqEngine, {"argv": ["python", 5]}, "arguments in argv must be text, not int"),
    (ZmqEngine, {"env": "A=1"}, "env must be a map, or None, not str"),
    (ZmqEngine, {"env": {"PORT": 1}}, "what env maps must be text, not int"),
    (ZmqEngine, {"pass_fds": 3}, "pass_fds must be a list of descriptors, not int"),
    (ZmqEngine, {"pass_fds": "3"}, "what pass_fds lists must be a whole number, not"),
    (ZmqEngine, {"pass_fds": [-1]}, "what pass_fds lists must be 0 or more, not -1"),
    (ZmqEngine, {"transport": "tcp"}, "transport must be one of pair, ipc"),
    (ZmqEngine, {"directory": "/tmp"}, "directory must be a Path or None, not str"),
    (ZmqEngine, {"arena_bytes": 1e6}, "arena_bytes must be a whole number, not float"),
    (ZmqEngine, {"arena_bytes": -1}, "arena_bytes must be 0 or more, not -1"),
    (ZmqEngine, {"arena": "file"}, "arena must be one of None, memfd, shm, frames"),
    (ZmqEngine, {"max_crashes": 1.5}, "max_crashes must be a whole number, not float"),
    (ZmqEngine, {"max_crashes": -1}, "max_crashes must be 0 or more, not -1"),
    (ThreadEngine, {"hold": "1"}, "hold must be a whole number, not str"),
    (ThreadEngine, {"restarts": 3}, "restarts must be Restarts or None, not int"),
    (EngineLoop, {"hold": -1}, "hold must be 0 or more, not -1"),
    (EngineLoop, {"arena": b""}, "arena must be an ArenaView or None, not bytes"),
    (EngineServer, {"endpoint": b"pair:"}, "endpoint must be text, as it came, not"),
    (EngineServer, {"leave_with_parent": "no"}, "leave_with_parent must be True or F"),
    (EngineServer, {"writable_arena": 1}, "writable_arena must be True or False, not"),
    (EngineServer, {"hold": None}, "hold must be a whole number, not NoneType"),
    (EngineClient, {"endpoint": 5}, "endpoint must be callable, not int"),
    (EngineClient, {"incarnation": "1"}, "incarnation must be a whole number, not str"),
    (EngineClient, {"window": 0}, "window must be 1 or more, not 0"),
    (EngineClient, {"arena": 4096}, "arena must be an Arena or None, not int"),
    (GeneratorBackend, {"serve": 5}, "serve must be callable, not int"),
    (GeneratorBackend, {"merge": "join"}, "merge must be one of None, concatenate"),
    (GeneratorBackend, {"backend": "curio"}, "backend must be one of asyncio, tri"),
    (GeneratorBackend, {"lifespan": 5}, "lifespan must be callable, not int"),
    (GeneratorBackend, {"status": {}}, "status must be callable, not dict"),
    (Arena, {"size": "1"}, "size must be a whole number, not str"),
    (Arena, {"size": -1}, "size must be 1 or more, not -1"),
    (Arena, {"kind": "file"}, "kind must be one of None, memfd, shm, frames"),
    (ArenaView, {"descriptor": None}, "descriptor must be a whole number, not None"),
    (ArenaView, {"writable": "no"}, "writable must be True or False, not str"),
    (Supervisor, {"spawn": 5}, "spawn must be callable, not int"),
    (Supervisor, {"restarts": None}, "restarts must be Restarts, not NoneType"),
    (SupervisedEngine, {"supervisor": 5}, "supervisor must be a Supervisor, not int"),
    (Finish, {"reason": "done"}, "reason must be one of completed, cancelled, fai"),
]
# Of each of them, what is right.
RIGHT: dict[Callable[..., object], dict[str, Any]] = {
    ZmqEngine: {"argv": ["true"]},
    ThreadEngine: {"factory": Once},
    EngineLoop: {"backend": Once(), "incarnation": 1},
    EngineServer: {"endpoint": "pair:", "backend": Once(), "incarnation": 1},
    EngineClient: {"endpoint": lambda _: None, "incarnation": 1},
    GeneratorBackend: {"serve": lambda *_: None},
    Arena: {"size": 4096},
    ArenaView: {"descriptor": 2**20},
    Supervisor: {"spawn": lambda *_: None, "restarts": Restarts()},
    SupervisedEngine: {},
    Finish: {"reason": "completed"},
}


@pytest.mark.parametrize(("make", "option", "words"), OTHERS)
def test_refuses_option_of_another_kind(
    make: Callable[..., object], option: dict[str, Any], words: str
) -> None:
    """At once and by its name, not by an attribute that something lacks much later."""
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(words)}"):
        make(**(RIGHT[make] | option))


SECONDS: list[tuple[Callable[..., object], str]] = [
    *((ZmqEngine, f"{name}_timeout") for name in ("ready", "stop")),
    *((ZmqEngine, f"{name}_after") for name in ("busy", "stalled", "stopped")),
    *((ZmqEngine, it) for it in ("backoff", "max_backoff", "crash_window")),
    (ZmqEngine, "broken_for"),
    (ThreadEngine, "stall"),
    (ThreadEngine, "stop_timeout"),
    (EngineLoop, "stall"),
    (EngineServer, "stall"),
    (EngineClient, "retry_after"),
]


@pytest.mark.parametrize(("make", "name"), SECONDS)
@pytest.mark.parametrize("given", ["1", True, -1, float("nan")])
def test_refuses_time_that_is_none(
    make: Callable[..., object], name: str, given: Any
) -> None:
    """No text, no yes or no, nothing below 0, and not what is no number."""
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
        make(**(RIGHT[make] | {name: given}))


def test_refuses_backend_where_its_maker_is_asked_for() -> None:
    """A thread makes its backend itself, each time anew."""
    with pytest.raises(TypeError, match="must make a backend, not be one: give Once$"):
        ThreadEngine(Once())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ask", [lambda engine: engine.wait_ready(), lambda engine: engine.start("a", {})]
)
async def test_says_when_the_engine_was_not_entered(
    ask: Callable[[ThreadEngine], Any],
) -> None:
    """It is no engine that starts up, which a client might wait for."""
    with pytest.raises(RuntimeError, match="enter the engine with async with first"):
        await ask(ThreadEngine(Once))


async def test_says_what_of_a_start_is_wrong() -> None:
    """Requests, tensors or results of a wrong type raise, and nothing runs."""
    box: Any = {"pixels": b"x"}
    odd: Any = "text"
    with anyio.fail_after(20):
        async with ThreadEngine(Once) as engine:
            await engine.wait_ready()
            with pytest.raises(TypeError, match="must be a Payload, not dict; pass"):
                await engine.start("a", {}, box)
            with pytest.raises(TypeError, match="a map of plain values, not str"):
                await engine.start("a", odd)
            with pytest.raises(RequestRejected, match="map of names, not int"):
                await engine.start("a", {}, Payload(5))  # type: ignore[arg-type]
            words = re.escape("start returned str, not None or a Merge")
            with pytest.raises(RequestRejected, match=words):
                await engine.start("a", {"merge": "join"})
            assert (await engine.status())["backend"] == {"keys": 0}


async def test_says_what_an_item_may_be() -> None:
    """Streaming a numpy number raises an error that names the alternative."""

    class Odd(Once):
        def step(self) -> list[Output]:
            keys, self.keys = self.keys, []
            return [Output(key, [object()]) for key in keys]

    with anyio.fail_after(20):
        async with ThreadEngine(Odd) as engine:
            await engine.wait_ready()
            stream = await engine.start("a", {})
            with pytest.raises(EngineFailed, match="an item takes plain values only"):
                await anext(stream)
            await engine.end("a")


@pytest.mark.parametrize(
    ("key", "got"), [(7, "<class 'int'>"), ("", "0 char"), ("x" * 257, "257 char")]
)
async def test_names_what_is_wrong_with_a_key(key: Any, got: str) -> None:
    """The type where that is wrong, and the length where that is."""
    async with ThreadEngine(Once) as engine:
        with anyio.fail_after(60):
            await engine.wait_ready()
        with pytest.raises(ValueError, match=f"got {got}"):
            await engine.start(key, {})
