"""More requests than a server has room for, and pictures again and again."""

from __future__ import annotations

import json
import resource
from collections import Counter
from email.utils import parsedate

import anyio

from lifecycle_tools.check.client import Response, ask
from lifecycle_tools.check.payloads import picture
from lifecycle_tools.check.report import Finding
from lifecycle_tools.check.target import Target

PROMPT = 10.0
MIB = 2**20
# Requests at once, at most, and by how many times they grow until some are refused.
_MOST = 1024
_GROWS = 4


async def _burst(target: Target, request: bytes, count: int) -> list[Response]:
    responses: list[Response] = []

    async def client() -> None:
        timeout = 4 * target.settings.seconds
        responses.append(await ask(target.address, request, timeout=timeout))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(client)
    return responses


def _most() -> int:
    """Return how many requests at once this process has descriptors for."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if files < 0 else max(1, min(_MOST, files - 64))


async def burst(target: Target) -> list[Finding]:
    """Send many requests at once, more until some are refused, and judge those.

    Cancellation: all clients leave.
    """
    count, most = target.settings.concurrency, _most()
    request = target.request(tokens=32, stream=False)
    responses = await _burst(target, request, count)
    while count < most and all(each.status == 200 for each in responses):
        count = min(most, _GROWS * count)
        responses = await _burst(target, request, count)
    sent = f"{count} requests at once"
    refusals = [r for r in responses if r.status in (429, 503)]
    counted = Counter(r.described for r in responses)
    seen = ", ".join(f"{n} x {status}" for status, n in sorted(counted.items()))
    wrong = [r for r in responses if r.status not in (200, 429, 503)]
    if wrong:
        because = "An overload is answered by 429 or 503, and by nothing else."
        if not any(r.status for r in wrong):
            limit = 4 * target.settings.seconds
            because = f"Some requests were neither served nor refused in {limit:g} s."
        findings = [Finding("overload.status", sent, seen, "fail", because)]
    else:
        because = "Each request was served, or refused as overload."
        findings = [Finding("overload.status", sent, seen, "pass", because)]
    if refusals:
        return [*findings, *_judged(refusals, sent)]
    because = "Nothing was refused: the server has room for all of these."
    for name in ("overload.retry_after", "overload.shape", "overload.prompt"):
        findings.append(Finding(name, sent, "no refusal", "not observable", because))
    return findings


def _judged(refusals: list[Response], sent: str) -> list[Finding]:
    count = len(refusals)
    waits = sum(_says_when(r.headers.get("retry-after", "")) for r in refusals)
    shaped = sum(_is_error(r) for r in refusals)
    slowest = max(r.seconds for r in refusals)
    return [
        Finding(
            "overload.retry_after",
            sent,
            f"{waits} of {count} refusals",
            "pass" if waits == count else "fail",
            "Each refusal says in Retry-After when to come back."
            if waits == count
            else "A client that is refused cannot know when to come back.",
        ),
        Finding(
            "overload.shape",
            sent,
            f"{shaped} of {count} refusals",
            "pass" if shaped == count else "fail",
            "Each refusal has the error object of the API."
            if shaped == count
            else "SDKs look for an error object with a message, and find none.",
        ),
        Finding(
            "overload.prompt",
            sent,
            f"slowest refusal {slowest:.1f} s",
            "pass" if slowest <= PROMPT else "fail",
            f"Refusals came within {PROMPT:g} s."
            if slowest <= PROMPT
            else f"A refusal came later than {PROMPT:g} s.",
        ),
    ]


def _says_when(value: str) -> bool:
    return value.isdigit() or parsedate(value) is not None


def _is_error(response: Response) -> bool:
    try:
        data = json.loads(response.content)
        return isinstance(data["error"]["message"], str)
    except (ValueError, KeyError, TypeError):
        return False


async def picture_memory(target: Target) -> Finding:
    """Send honest pictures in rounds; memory must not grow with the rounds.

    Cancellation: all clients leave.
    """
    name, sent = "memory.pictures", "4 rounds of 4 PNGs of 1024 x 1024 pixels"
    if target.process is None:
        because = "Memory is seen from the same host only, with --pid."
        return Finding(name, sent, "unknown", "not observable", because)
    process = target.process
    request = target.request(tokens=4, stream=False, images=(picture(1024),))
    await _burst(target, request, 1)  # loads what decodes pictures
    process.peak = 0
    levels = [process.memory()]
    statuses: set[int] = set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.watch_memory)
        for _ in range(4):
            statuses |= {r.status for r in await _burst(target, request, 4)}
            await anyio.sleep(0.5)
            levels.append(process.memory())
        tasks.cancel_scope.cancel()
    if 200 not in statuses:
        because = "The server takes no pictures of this kind."
        return Finding(name, sent, str(sorted(statuses)), "not observable", because)
    growth = levels[-1] - levels[1]
    each = (process.peak - levels[0]) / 4 / MIB
    seen = f"peak +{each:.1f} MiB a picture, {growth / MIB:+.0f} MiB after the rounds"
    if growth <= max(32 * MIB, (process.peak - levels[0]) // 2):
        because = "Memory did not grow from round to round."
        return Finding(name, sent, seen, "pass", because)
    because = "Memory grew from round to round: pictures are kept."
    return Finding(name, sent, seen, "fail", because)
