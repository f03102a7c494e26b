"""Checks that both processes free all memory after thousands of unreliable clients.

Starts the engine with a tiny real checkpoint and sends it texts, pictures of odd
sizes and turns of conversations through the arena. Of the requests 40 % are given up
at random: cancelled, ENDed or dropped with their task, before the first token or
after any. Every answer is compared with the same prompt's first one.

After a warm-up nothing may be held at a quiet moment, and what the two processes hold
of memory, descriptors and threads must be what it was, however many requests later.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from engine_rig import machine, picture

from lifecycle import Payload
from lifecycle_zmq import ZmqEngine

# Of the clients, and of what a prompt may be answered with.
_LEAVE = 0.4
_TOKENS = 12


class Churn:
    """Clients of one engine, and the outcomes of their requests.

    Args:
        engine: Entered and ready.
        prompts: Request maps and arrays; those with a session are its turns.
        seed: Of all chance.
    """

    def __init__(self, engine: ZmqEngine, prompts: Sequence[Any], *, seed: int) -> None:
        self._engine, self._prompts = engine, prompts
        self._rng = random.Random(seed)
        self._answers: dict[int, list[int]] = {}
        self._number = 0
        self.completed = self.left = self.wrong = 0

    async def run(self, requests: int, *, clients: int) -> None:
        """Send *requests* from *clients* concurrent clients."""
        until = self._number + requests

        async def client() -> None:
            while self._number < until:
                self._number += 1
                await self._one(self._number)

        async with anyio.create_task_group() as tasks:
            for _ in range(clients):
                tasks.start_soon(client)

    async def _one(self, number: int) -> None:
        index = self._rng.randrange(len(self._prompts))
        leaves = self._rng.random() < _LEAVE
        key = f"r{number}"
        tokens: list[int] = []
        try:
            if not leaves:
                await self._read(key, index, tokens, _TOKENS)
            elif self._rng.random() < 0.5:
                await self._read(key, index, tokens, self._rng.randrange(_TOKENS))
                if self._rng.random() < 0.5:
                    self._engine.cancel(key)
            else:
                with anyio.move_on_after(self._rng.random() * 0.3):
                    await self._read(key, index, tokens, _TOKENS)
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.end(key)
        self._book(index, tokens, leaves=leaves)

    async def _read(self, key: str, index: int, tokens: list[int], count: int) -> None:
        prepared = self._prompts[index]
        box = Payload(self._in_arena(prepared.tensors), nbytes=prepared.nbytes)
        stream = await self._engine.start(key, prepared.request, box)
        if count:
            async for item in stream:
                tokens += item if type(item) is list else []
                if len(tokens) >= count:
                    return

    def _in_arena(self, tensors: dict[str, Any]) -> dict[str, Any]:
        lent = {}
        for name, array in tensors.items():
            lent[name] = self._engine.arena.empty(array.shape, array.dtype)
            lent[name][...] = array
        return lent

    def _book(self, index: int, tokens: list[int], *, leaves: bool) -> None:
        self.left += leaves
        self.completed += not leaves
        wanted = self._answers.get(index, [])
        if len(tokens) > len(wanted):
            self._answers[index] = tokens
        self.wrong += any(a != b for a, b in zip(tokens, wanted, strict=False))


async def measure(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Run everything on one engine; return a sample after each part."""
    command = [sys.executable, "-m", "lifecycle_engine.worker", "--chunk=32"]
    command += [f"--checkpoint={checkpoint}", "--slots=12", "--max-batch=8"]
    command += ["--max-length=1024", "--graphs=fake", *options.engine]
    prompts = _prompts(checkpoint)
    async with ZmqEngine(command, arena_bytes=256 * 2**20) as engine:
        await engine.wait_ready()
        churn = Churn(engine, prompts, seed=options.seed)
        await churn.run(options.warm_up, clients=options.clients)
        seen = [await _sample(engine)]
        part = max(options.requests // options.parts, 1)
        begin = time.perf_counter()
        for _ in range(options.parts):
            await churn.run(part, clients=options.clients)
            seen.append(await _sample(engine))
            now = {name: f"{value / 1e6:.1f} MB" for name, value in _memory(seen[-1])}
            print(f"  {churn.completed + churn.left} requests: {now}", flush=True)
        seconds = time.perf_counter() - begin
        incarnation = engine.incarnation
    return {
        "requests": part * options.parts,
        "completed": churn.completed,
        "given_up": churn.left,
        "wrong": churn.wrong,
        "seconds": seconds,
        "incarnations": incarnation,
        "seen": seen,
    }


def problems(report: dict[str, Any], *, slack: float) -> list[str]:
    """Return what differs from the start, except for *slack* bytes of memory."""
    first, *rest = report["seen"]
    wrong = []
    if report["wrong"] or report["incarnations"] != 1:
        wrong.append(
            f"{report['wrong']} wrong answers, {report['incarnations']} engines"
        )
    for seen in rest:
        held = {name: seen[name] for name in seen if name.startswith("held_")}
        wrong += [f"{name} is {value}" for name, value in held.items() if value]
    last = rest[-1]
    for name in ("api_descriptors", "engine_descriptors", "engine_threads"):
        if last[name] > first[name]:
            wrong.append(f"{name} were {first[name]} and are {last[name]}")
    for name, value in _memory(last):
        grown = value - first[name]
        if grown > slack:
            wrong.append(f"{name} grew by {grown / 1e6:.1f} MB to {value / 1e6:.1f} MB")
    return wrong


def _memory(seen: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, seen[name]) for name in ("api_private", "engine_private")]


async def _sample(engine: ZmqEngine) -> dict[str, Any]:
    """Return the resources of both processes while there are no requests."""
    gc.collect()
    with anyio.fail_after(30):
        # The latest releases are reported a moment later.
        while (status := await engine.status())["live"] or status["leases"]:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    backend, pid = status["backend"], engine.pid
    lost = backend["slots"] - backend["slots_free"]
    return {
        "held_streams": engine.streams,
        "held_arena": engine.arena.statistics().used,
        "held_payload": backend["payload_bytes"],
        "held_slots": lost,
        "held_waiting": backend["waiting"],
        "held_unended": backend["started"] - sum(backend["finished"].values()),
        "resumed": backend["tokens_resumed"],
        "preempted": backend["preempted"],
        "api_private": _private(os.getpid()),
        "engine_private": _private(pid),
        "api_descriptors": _count(os.getpid(), "fd"),
        "engine_descriptors": _count(pid, "fd"),
        "engine_threads": _count(pid, "task"),
    }


def _private(pid: int | None) -> float:
    """Return the private memory of a process, without the shared arena."""
    pages = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
        if line.startswith(("Private_Dirty", "Private_Clean")):
            pages += int(line.split()[1])
    return pages * 1024.0


def _count(pid: int | None, what: str) -> int:
    return len(list(Path(f"/proc/{pid}/{what}").iterdir()))


def _prompts(checkpoint: Path) -> list[Any]:
    """Return texts, pictures and conversations of several tenants."""
    from lifecycle_engine import Chat, ChatProcessor, Message

    processor = ChatProcessor(checkpoint)
    messages: list[Message] = []
    prepared = []
    for number in range(6):
        pictures = [
            picture(31 + 17 * number, 45 + 9 * at, seed=at) for at in range(number % 4)
        ]
        alone = Message("user", [*pictures, f"What of {number}?" * (number + 1)])
        messages += [Message("user", [*pictures[:1], "And?"])]
        for talk, session in (([alone], None), (messages, f"s{number % 2}")):
            chat = Chat(talk, _TOKENS, tenant=f"u{number % 3}", session=session)
            prepared.append(processor.prepare(chat))
        messages.append(Message("assistant", [f"Well, {number}."]))
    return prepared


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; return exit status 1 after a leak."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "tiny_checkpoint", folder]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        report = anyio.run(measure, options, Path(folder))
    report["machine"] = machine()
    wrong = problems(report, slack=options.slack * 2**20)
    rate = report["requests"] / report["seconds"]
    print(f"{report['requests']} requests, {rate:.0f} a second: ", end="")
    print("; ".join(wrong) or "everything came back")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Find leaks under clients that disconnect."
    )
    add = parser.add_argument
    add("--requests", type=int, default=10_000)
    add("--warm-up", type=int, default=500)
    add("--clients", type=int, default=24)
    add("--parts", type=int, default=10, help="number of memory samples")
    add("--slack", type=float, default=4, help="MiB that a process may grow by")
    add("--seed", type=int, default=0)
    add("engine", nargs="*", help="options of its process: -- --speculative ngram")
    add("--json", type=Path, help="file for the samples")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
