"""Clients that leave, at each phase of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import anyio
from anyio.abc import ByteStream

from lifecycle_tools.check.client import GONE, read_head, read_response
from lifecycle_tools.check.report import Finding
from lifecycle_tools.check.target import GRACE, Load, Target

Act = Callable[[Target, ByteStream], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Phase:
    """What a client does before it leaves; *act* returns whether work began."""

    id: str
    sent: str
    act: Act
    works: bool = True


async def _nothing(_target: Target, _stream: ByteStream) -> bool:
    return True


async def _half_head(target: Target, stream: ByteStream) -> bool:
    await stream.send(target.request(tokens=4, stream=True)[:40])
    return True


async def _half_body(target: Target, stream: ByteStream) -> bool:
    request = target.request(tokens=4, stream=True)
    await stream.send(request[: request.index(b"\r\n\r\n") + 24])
    return True


async def _whole(target: Target, stream: ByteStream) -> bool:
    await stream.send(target.request(tokens=target.settings.tokens, stream=True))
    await anyio.sleep(0.05)
    return True


async def _first_event(target: Target, stream: ByteStream) -> bool:
    await stream.send(target.request(tokens=target.settings.tokens, stream=True))
    response = await read_head(stream)
    if response.status == 200 and not response.body:
        response.body = await stream.receive()
    return response.status == 200


async def _mid_stream(target: Target, stream: ByteStream) -> bool:
    if not await _first_event(target, stream):
        return False
    with anyio.move_on_after(0.5):
        while True:
            await stream.receive()
    return True


async def _unstreamed(target: Target, stream: ByteStream) -> bool:
    await stream.send(target.request(tokens=target.settings.tokens, stream=False))
    await anyio.sleep(0.5)
    return True


PHASES = (
    Phase("leave.connected", "a connection, and nothing on it", _nothing, works=False),
    Phase("leave.half_head", "half a head", _half_head, works=False),
    Phase("leave.half_body", "half a body", _half_body, works=False),
    Phase("leave.body_sent", "a whole request; left before the first byte", _whole),
    Phase("leave.first_event", "a stream, left after its first event", _first_event),
    Phase("leave.mid_stream", "a stream, left half a second into it", _mid_stream),
    Phase("leave.unstreamed", "a request without stream, left at work", _unstreamed),
)


async def _trial(target: Target, phase: Phase, *, leaves: bool) -> Load | None:
    """Measure the load `GRACE` seconds after the clients left, or would have."""
    began: list[bool] = []

    async def client(stack: AsyncExitStack) -> None:
        try:
            stream = await target.address.connect()
        except OSError:
            return
        stack.push_async_callback(anyio.aclose_forcefully, stream)
        with anyio.move_on_after(target.settings.seconds):
            try:
                began.append(await phase.act(target, stream))
            except GONE:
                began.append(False)

    async with AsyncExitStack() as here:
        stack = await here.enter_async_context(AsyncExitStack())
        async with anyio.create_task_group() as tasks:
            for _ in range(target.settings.clients):
                tasks.start_soon(client, stack)
        if leaves:
            await stack.aclose()
        await anyio.sleep(GRACE)
        if not leaves and not any(began):
            return None
        return await target.load()


@dataclass(frozen=True, slots=True)
class Sign:
    """What tells work from no work, in one turn.

    Attributes:
        text: What was seen, with two places for numbers.
        left: Seen after clients that left.
        stayed: Seen with clients that stayed.
        works: Whether the first shows work.
    """

    text: str
    left: float
    stayed: float
    works: bool


def _signs(idle: Load, stayed: Load, left: Load) -> Iterator[Sign]:
    if stayed.cpu is not None and idle.cpu is not None and left.cpu is not None:
        rise = stayed.cpu - idle.cpu
        if rise > 0.05 + idle.cpu:
            works = left.cpu > idle.cpu + rise / 2
            yield Sign("CPU {} s/s (stayed {})", left.cpu, stayed.cpu, works)
    if stayed.running and left.running is not None:
        before = idle.running or 0
        if stayed.running - before >= 1:
            works = left.running > before
            yield Sign("{} running (stayed {})", left.running, stayed.running, works)
    rise = stayed.latency - idle.latency
    if rise > 0.5 + idle.latency:
        works = left.latency > idle.latency + rise / 2
        text = "next answer in {} s (stayed {})"
        yield Sign(text, left.latency, stayed.latency, works)


def judge_turns(phase: Phase, turns: Sequence[Sequence[Sign]]) -> Finding:
    """Judge what was seen in turns of clients that stay and that leave at *phase*."""
    found: dict[str, list[Sign]] = {}
    for sign in chain.from_iterable(turns):
        found.setdefault(sign.text, []).append(sign)
    seen = "; ".join(_seen(signs) for signs in found.values()) or "no sign of work"
    unseen = partial(Finding, phase.id, phase.sent, seen, "not observable")
    if not found:
        return unseen(
            "With clients that stay, no work is seen either; try more --tokens."
        )
    steady = [signs for signs in found.values() if len(signs) == len(turns)]
    works = [{sign.works for sign in signs} for signs in steady]
    if {True} in works:
        because = f"The server works on {GRACE:g} s after all clients left."
        return Finding(phase.id, phase.sent, seen, "fail", because)
    if not steady or {True, False} in works:
        why = f"The {len(turns)} turns disagree: too noisy"
        return unseen(f"{why}; leave the machine idle, or try more --tokens.")
    because = f"The work had ended {GRACE:g} s after all clients left."
    return Finding(phase.id, phase.sent, seen, "pass", because)


def _seen(signs: Sequence[Sign]) -> str:
    left, stayed = (
        _spread([getattr(sign, name) for sign in signs]) for name in ("left", "stayed")
    )
    return signs[0].text.format(left, stayed)


def _spread(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


async def _held_up(target: Target, phase: Phase) -> Finding:
    left = await _trial(target, phase, leaves=True)
    latency = target.settings.seconds if left is None else left.latency
    seen = f"next answer in {latency:.2f} s (idle {target.idle.latency:.2f})"
    if latency <= target.slow_after:
        because = "An honest request afterwards was served as before."
        return Finding(phase.id, phase.sent, seen, "pass", because)
    because = "Clients that left still hold up an honest request."
    return Finding(phase.id, phase.sent, seen, "fail", because)


async def leave(target: Target, phase: Phase) -> Finding:
    """Leave at *phase*, and compare with clients that stay, in turns.

    Cancellation: all clients leave.
    """
    if not phase.works:
        return await _held_up(target, phase)
    turns: list[list[Sign]] = []
    for _ in range(target.settings.turns):
        stayed = await _trial(target, phase, leaves=False)
        if stayed is None:
            because = "The server did not begin to serve the requests."
            return Finding(phase.id, phase.sent, "refused", "not observable", because)
        if not await target.settle():
            because = "The server was still busy with requests of before."
            return Finding(phase.id, phase.sent, "busy", "not observable", because)
        left = await _trial(target, phase, leaves=True)
        turns.append([*_signs(target.idle, stayed, left)] if left else [])
        await target.settle()
    return judge_turns(phase, turns)


async def half_close(target: Target) -> Finding:
    """Send a whole request, close the sending side, and wait for the response.

    Cancellation: the connection is closed.
    """
    name, sent = "leave.half_close", "a whole request, then the end of sending"
    if target.address.tls:
        because = "TLS has no half-close that servers agree on."
        return Finding(name, sent, "not sent", "not observable", because)
    stream = await target.address.connect()
    status, ended = 0, False
    try:
        with anyio.move_on_after(target.settings.seconds):
            await stream.send(target.request(tokens=4, stream=False))
            await stream.send_eof()
            response = await read_response(stream)
            status, ended = response.status, True
    finally:
        await anyio.aclose_forcefully(stream)
    if status:
        because = "A half-closed connection gets its response."
        return Finding(name, sent, f"{status}", "pass", because)
    if ended:
        because = "The server takes a half-close for a disconnect, which is allowed."
        return Finding(name, sent, "closed", "pass", because)
    because = "Neither a response nor an end: the connection is left open."
    return Finding(name, sent, "no response", "fail", because)
