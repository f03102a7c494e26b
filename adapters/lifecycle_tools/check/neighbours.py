"""One client that takes all it can get, beside another one that asks for little."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio
import anyio.to_process
import anyio.to_thread
from anyio.abc import ByteStream

from lifecycle_tools.check.client import GONE, Address, ask, read_head
from lifecycle_tools.check.payloads import picture
from lifecycle_tools.check.report import Finding
from lifecycle_tools.check.target import Settings, Target

# Requests of the honest client in each phase; the p99 of a hundred is the second worst.
_REQUESTS = 100
_FEWEST_REQUESTS = 10
_SECONDS_BETWEEN = 0.02
# Seconds that an attack has to unfold before the honest client is timed.
_UNFOLD = 1.0
# Seconds until a greedy client that was answered comes again.
_COMES_AGAIN = 0.25
# Latencies that differ by less are the same: a turn of the scheduler takes as long.
_RESOLUTION = 0.005
_UPLOAD = 49 * 2**20
_CHUNK = b" " * 65536


@dataclass(frozen=True, slots=True)
class Attack:
    """What one client does to the others.

    Attributes:
        limit: Factor by which others may be served later than alone.
    """

    name: str
    sent: str
    clients: int
    limit: float
    images: bool = False


ATTACKS = (
    Attack("slow_bodies", "24 bodies of 49 MiB that trickle in", 24, 2.0),
    Attack("flood", "1,400 requests at once, again and again", 1400, 4.0),
    Attack("uploads", "120 bodies of 49 MiB at once", 120, 2.0),
    Attack("slow_readers", "64 streams that are not read", 64, 4.0),
    Attack("pictures", "32 pictures of 35 megapixels", 32, 2.0, images=True),
)


async def beside(
    target: Target, *, attack: Attack, requests: int = _REQUESTS
) -> Finding:
    """Time *requests* of a small client alone, and then beside *attack* of another.

    Cancellation: all clients leave.
    """
    greedy, settings = target.address, target.settings
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], attack.clients + 32
    unseen = partial(Finding, f"neighbours.{attack.name}", attack.sent)
    if 0 <= files < needed:
        because = f"The attack needs {needed}; raise the limit with ulimit -Hn."
        return unseen(f"a limit of {files} open files", "not observable", because)
    honest = Target(settings.neighbour(greedy), settings)
    alone = await _timed(honest, requests)
    if None in alone:
        seen = f"{alone.count(None)} of {len(alone)} not served alone"
        because = f"It must serve {honest.address.source or '--neighbour-key'}, too."
        return unseen(seen, "not observable", because)
    beside: list[float | None] = []

    async def attack_until_timed() -> None:
        # In a process of its own, or the clients would delay each other.
        attacking = partial(anyio.to_process.run_sync, cancellable=True)
        # anyio says ProcessLookupError of one that is killed while it starts.
        with suppress(anyio.BrokenWorkerProcess, ProcessLookupError):
            await attacking(run_attack, greedy, settings, attack)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attack_until_timed)
        await anyio.sleep(_UNFOLD)
        beside = await _timed(honest, requests)
        tasks.cancel_scope.cancel()
    if not beside:
        because = "It may have been killed, for memory or by hand."
        return unseen("the attack's process ended", "not observable", because)
    found = judge(attack, alone, beside, settings.seconds)
    if await target.settle():
        return found
    because = "The server does not come to rest when the attack has ended."
    return replace(found, verdict="fail", because=because)


def judge(
    attack: Attack,
    alone: Sequence[float | None],
    beside: Sequence[float | None],
    longest: float,
) -> Finding:
    """Compare the small client's requests beside an attack with those without it.

    Args:
        attack: What stood beside it.
        alone: Seconds of each request; ``None`` for one that was not served.
        beside: The same, during the attack.
        longest: Seconds that count for a request that was not served.
    """
    quiet, worst = (_p99(each, longest) for each in (alone, beside))
    factor = max(1.0, (worst - _RESOLUTION) / quiet)
    missed = sum(each is None for each in beside)
    seen = f"p99 {1e3 * quiet:.0f} ms alone, {1e3 * worst:.0f} ms beside it: "
    seen += f"{factor:.1f} times"
    if missed:
        seen += f", {missed} of {len(beside)} not served"
    name, limit = f"neighbours.{attack.name}", f"{attack.limit:g} times"
    if factor <= attack.limit and not missed:
        because = f"A client waits for at most {limit} as long as alone."
        return Finding(name, attack.sent, seen, "pass", because)
    because = f"A client keeps others waiting for more than {limit} as long as alone."
    if missed:
        because = "A client keeps others from being served at all."
    return Finding(name, attack.sent, seen, "fail", because)


async def _timed(target: Target, requests: int) -> list[float | None]:
    """Return the seconds of each small request; ``None`` for one that is not served."""
    until = anyio.current_time() + 2 * target.settings.seconds
    times: list[float | None] = []
    while len(times) < _FEWEST_REQUESTS or (
        len(times) < requests and anyio.current_time() < until
    ):
        response = await target.honest()
        times.append(response.seconds if response.status == 200 else None)
        await anyio.sleep(_SECONDS_BETWEEN)
    return times


def _p99(times: Sequence[float | None], missed: float) -> float:
    found = [missed if each is None else each for each in times]
    return statistics.quantiles(found, n=100, method="inclusive")[-1]


def run_attack(address: Address, settings: Settings, attack: Attack) -> None:
    """Attack until this process is ended. Public, as another process looks it up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    anyio.run(_attack, Target(address, settings), attack)


async def _attack(target: Target, attack: Attack) -> None:
    client = partial(_CLIENTS[attack.name], target)
    async with anyio.create_task_group() as tasks:
        for _ in range(attack.clients):
            tasks.start_soon(_again, client)
        # The end of the pipe from the process that started this one, or of that.
        await anyio.wait_readable(0)
        tasks.cancel_scope.cancel()


async def _again(client: Callable[[], Awaitable[None]]) -> None:
    while True:
        with suppress(OSError, *GONE):  # refused, which is right
            await client()
        await anyio.sleep(_COMES_AGAIN)


async def _slow_body(target: Target) -> None:
    await _upload(target, every=0.2)


async def _flood(target: Target) -> None:
    request = target.request(tokens=target.settings.tokens, stream=False)
    await ask(target.address, request, timeout=4 * target.settings.seconds)


async def _upload(target: Target, *, every: float = 0.0) -> None:
    """Send a small request with much space behind it, until it is answered."""
    request = target.request(tokens=4, stream=False, length=_UPLOAD)
    rest = _UPLOAD - len(request.partition(b"\r\n\r\n")[2])
    stream = await target.address.connect()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_answered, stream, tasks.cancel_scope)
            await stream.send(request)
            for sent in range(0, rest, len(_CHUNK)):
                await anyio.sleep(every)
                await stream.send(_CHUNK[: rest - sent])
    except* GONE:
        pass
    finally:
        await anyio.aclose_forcefully(stream)


async def _until_answered(stream: ByteStream, sending: anyio.CancelScope) -> None:
    await read_head(stream)
    sending.cancel()


async def _slow_reader(target: Target) -> None:
    request = target.request(tokens=8 * target.settings.tokens, stream=True)
    with await anyio.to_thread.run_sync(target.address.connect_narrow) as unread:
        unread.sendall(request)
        await anyio.sleep(4 * target.settings.seconds)


async def _picture(target: Target) -> None:
    request = target.request(tokens=4, stream=False, images=(picture(5916),))
    await ask(target.address, request, timeout=4 * target.settings.seconds)


_CLIENTS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "slow_bodies": _slow_body,
    "flood": _flood,
    "uploads": _upload,
    "slow_readers": _slow_reader,
    "pictures": _picture,
}
