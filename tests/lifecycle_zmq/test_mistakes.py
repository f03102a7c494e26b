"""Mistakes that everybody makes once are told at once, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import Payload
from lifecycle_zmq import (
    EngineFailed,
    EngineLoop,
    Finish,
    Output,
    RequestRejected,
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
    ],
)
def test_names_what_a_backend_lacks(backend: Any, words: str) -> None:
    """It is told before the first request, and a `busy` never spins unnoticed."""
    with pytest.raises(TypeError, match=f"^{words}"):
        EngineLoop(backend, incarnation=1)


def test_refuses_incarnation_that_is_text() -> None:
    """As it comes on the command line it would answer to no client, for ever."""
    with pytest.raises(TypeError, match=r"must be an int, not str; give int\(\) of it"):
        EngineLoop(Once(), incarnation="1")  # type: ignore[arg-type]


def test_refuses_command_that_is_one_text() -> None:
    """Its letters are not taken for arguments."""
    with pytest.raises(TypeError, match=r"argv must be a list, not str; shlex.split"):
        ZmqEngine("python engine.py")


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
    """A request, tensors or a result of another kind are told, and nothing runs."""
    box: Any = {"pixels": b"x"}
    odd: Any = "text"
    with anyio.fail_after(20):
        async with ThreadEngine(Once) as engine:
            await engine.wait_ready()
            with pytest.raises(TypeError, match="travel in a Payload, not dict: give"):
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
    """Whoever streams a number of numpy's is told what to stream instead."""

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
