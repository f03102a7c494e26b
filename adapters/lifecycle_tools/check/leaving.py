"""Clients that leave, at each phase of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

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


def _signals(idle: Load, stayed: Load, left: Load) -> list[tuple[str, bool]]:
    """Return each sign that tells work from no work, and whether it shows work."""
    found = []
    if stayed.cpu is not None and idle.cpu is not None and left.cpu is not None:
        rise = stayed.cpu - idle.cpu
        if rise > 0.05 + idle.cpu:
            seen = f"CPU {left.cpu:.2f} s/s (stayed {stayed.cpu:.2f})"
            found.append((seen, left.cpu > idle.cpu + rise / 2))
    if stayed.running and left.running is not None:
        rise = stayed.running - (idle.running or 0)
        if rise >= 1:
            seen = f"{left.running:g} running (stayed {stayed.running:g})"
            found.append((seen, left.running > (idle.running or 0)))
    rise = stayed.latency - idle.latency
    if rise > 0.5 + idle.latency:
        seen = f"next answer in {left.latency:.1f} s (stayed {stayed.latency:.1f})"
        found.append((seen, left.latency > idle.latency + rise / 2))
    return found


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
    """Leave at *phase*, and compare with clients that stay.

    Cancellation: all clients leave.
    """
    if not phase.works:
        return await _held_up(target, phase)
    stayed = await _trial(target, phase, leaves=False)
    if stayed is None:
        because = "The server did not begin to serve the requests."
        return Finding(phase.id, phase.sent, "refused", "not observable", because)
    if not await target.settle():
        because = "The server was still busy with requests of before."
        return Finding(phase.id, phase.sent, "busy", "not observable", because)
    left = await _trial(target, phase, leaves=True)
    signals = _signals(target.idle, stayed, left) if left else []
    await target.settle()
    seen = "; ".join(text for text, _ in signals) or "no sign of work"
    if not signals:
        because = "With clients that stay, no work is seen either; try more --tokens."
        return Finding(phase.id, phase.sent, seen, "not observable", because)
    if any(works for _, works in signals):
        because = f"The server works on {GRACE:g} s after all clients left."
        return Finding(phase.id, phase.sent, seen, "fail", because)
    because = f"The work had ended {GRACE:g} s after all clients left."
    return Finding(phase.id, phase.sent, seen, "pass", because)


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
