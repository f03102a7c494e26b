"""Requests that are small, and cost much; a good server refuses them kindly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import ByteStream

from lifecycle_tools.check import payloads
from lifecycle_tools.check.client import GONE, Response, ask, read_response
from lifecycle_tools.check.report import Finding
from lifecycle_tools.check.target import Target

MIB = 2**20
CHUNKED_BYTES = 192 * MIB
DECLARED_BYTES = 100 * 2**30
# What one small request may add to the memory of a server that accepts it.
MEMORY_LIMIT = 128 * MIB


async def _measured(
    target: Target, send: Callable[[], Awaitable[Response]]
) -> tuple[Response, int | None]:
    """Send a bomb; return the response, and by how much memory rose."""
    process = target.process
    if process is None:
        return await send(), None
    process.peak = 0
    before = process.memory()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.watch_memory)
        response = await send()
        tasks.cancel_scope.cancel()
    return response, process.peak - before


def _judged(name: str, sent: str, response: Response, rise: int | None) -> Finding:
    seen = f"{response.described} in {response.seconds:.1f} s"
    if rise is not None:
        seen += f", memory +{rise / MIB:.0f} MiB"
    found = partial(Finding, name, sent, seen)
    if rise is not None and rise > MEMORY_LIMIT:
        because = f"One small request took more than {MEMORY_LIMIT // MIB} MiB."
        return found("fail", because)
    if not response.status:
        return found("fail", "The server neither accepted nor refused the request.")
    if response.status >= 500 and response.status != 503:
        return found("fail", "A bad request is answered as a fault of the server.")
    if response.status in (429, 503) or 400 <= response.status < 500:
        return found("pass", "The server refused it as a fault of the client.")
    if rise is None:
        because = "The server accepted it; without --pid its memory is unknown."
        return found("not observable", because)
    return found("pass", "The server accepted it within the memory of a small request.")


async def _bomb(target: Target, name: str, sent: str, request: bytes) -> Finding:
    async def send() -> Response:
        return await ask(target.address, request, timeout=target.settings.seconds)

    return _judged(name, sent, *await _measured(target, send))


async def pixels(target: Target) -> Finding:
    """Send a whole picture of 144 megapixels in some 20 KiB."""
    image = payloads.picture(12000)
    request = target.request(tokens=4, stream=False, images=(image,))
    sent = f"a PNG of 12000 x 12000 pixels in {len(image) // 1024} KiB"
    return await _bomb(target, "bomb.pixels", sent, request)


async def declared_pixels(target: Target) -> Finding:
    """Send a picture whose header alone is huge."""
    image = payloads.declared_picture(60000)
    request = target.request(tokens=4, stream=False, images=(image,))
    sent = "a PNG that declares 60000 x 60000 pixels, and has none"
    return await _bomb(target, "bomb.declared_pixels", sent, request)


async def truncated(target: Target) -> Finding:
    """Send half a picture."""
    images = (payloads.truncated_picture(),)
    request = target.request(tokens=4, stream=False, images=images)
    return await _bomb(target, "bomb.truncated", "half a PNG", request)


async def many_images(target: Target) -> Finding:
    """Send one request with many pictures."""
    images = (payloads.picture(1024),) * 64
    request = target.request(tokens=4, stream=False, images=images)
    sent = "64 PNGs of 1024 x 1024 pixels in one request"
    return await _bomb(target, "bomb.many_images", sent, request)


async def nested(target: Target) -> Finding:
    """Send JSON that is nested too deep to parse."""
    request = target.address.post(target.path, payloads.nested(100_000))
    sent = "JSON of 100,000 nested arrays"
    return await _bomb(target, "bomb.nested", sent, request)


async def gzipped(target: Target) -> Finding:
    """Send a body that decompresses to a thousand times its size."""
    body = payloads.gzip_bomb(256 * MIB)
    request = target.address.post(target.path, body, ("Content-Encoding", "gzip"))
    sent = f"256 MiB of zeros as {len(body) // 1024} KiB of gzip"
    return await _bomb(target, "bomb.gzip", sent, request)


async def declared_body(target: Target) -> Finding:
    """Declare a body that no server can hold, and send none of it."""
    head = target.address.head(
        "POST",
        target.path,
        ("Content-Type", "application/json"),
        ("Content-Length", str(DECLARED_BYTES)),
    )
    limit = min(5.0, target.settings.seconds)
    response = await ask(target.address, head, timeout=limit)
    sent = "the head of a body of 100 GiB"
    found = partial(Finding, "bomb.declared_body", sent, response.described)
    if 400 <= response.status < 500 or response.status == 503:
        return found("pass", "Refused by its declared length, before the body.")
    if response.status:
        return found("fail", "A body of that length is answered by 413.")
    if response.seconds < limit / 2:
        return found("fail", "The connection ends without a response.")
    return found("fail", "The server waits for a body that it can never hold.")


@dataclass(slots=True)
class _Upload:
    sent: int = 0
    # Whether a response or the end of the connection came in time.
    answered: bool = False


async def chunked_body(target: Target) -> Finding:
    """Send a body without a declared length, until the server refuses it."""
    upload = _Upload()

    async def send() -> Response:
        response = Response()
        try:
            stream = await target.address.connect()
        except OSError:
            return response
        try:
            with anyio.move_on_after(4 * target.settings.seconds):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_send_chunks, target, stream, upload)
                    response = await read_response(stream)
                    upload.answered = True
                    tasks.cancel_scope.cancel()
        finally:
            await anyio.aclose_forcefully(stream)
        return response

    response, rise = await _measured(target, send)
    return _judged_chunks(response, rise, upload)


async def _send_chunks(target: Target, stream: ByteStream, upload: _Upload) -> None:
    head = target.address.head(
        "POST",
        target.path,
        ("Content-Type", "application/json"),
        ("Transfer-Encoding", "chunked"),
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    try:
        await stream.send(head)
        while upload.sent < CHUNKED_BYTES:
            await stream.send(chunk)
            upload.sent += 0x10000
        await stream.send(b"0\r\n\r\n")
    except GONE:
        pass  # refused: the response may be there to read


def _judged_chunks(response: Response, rise: int | None, upload: _Upload) -> Finding:
    sent = f"up to {CHUNKED_BYTES // MIB} MiB in chunks"
    seen = f"{response.described} after {upload.sent // MIB} MiB"
    if rise is not None:
        seen += f", memory +{rise / MIB:.0f} MiB"
    found = partial(Finding, "bomb.chunked_body", sent, seen)
    whole = upload.sent >= CHUNKED_BYTES
    if not upload.answered:
        because = "The server neither refused the body nor ended the connection."
        return found("fail", because)
    if rise is not None and rise > MEMORY_LIMIT:
        because = f"The body took more than {MEMORY_LIMIT // MIB} MiB of memory."
        return found("fail", because)
    if response.status == 413:
        return found("pass", "The server refused the body as too large.")
    if not whole and (response.status < 500 or response.status == 503):
        return found("pass", "The server ended the upload before its end.")
    if whole:
        return found("fail", "The server read the whole body, which has no limit.")
    return found("fail", "A large body is answered as a fault of the server.")
