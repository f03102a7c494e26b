"""One run of the demo, from the start of the server to the exit status.

The server is a process, the clients are tasks of this one. The engine is killed
once in the middle; at the end everything is looked for that might be left.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import openai
from rich.console import Console

from lifecycle_engine.demo.clients import Client, Ledger
from lifecycle_engine.demo.report import Findings, left, show
from lifecycle_engine.demo.server import Server, kill, running
from lifecycle_engine.demo.traffic import Job, plan
from lifecycle_engine.demo.view import View

QUIET_LIMIT = 20.0
"""Seconds after the last answer for the last clean-up to be done."""


async def run(
    *,
    arguments: Sequence[str] = (),
    clients: int = 32,
    requests: int = 160,
    seed: int = 1,
    console: Console | None = None,
) -> int:
    """Run the demo.

    Args:
        arguments: Further arguments for ``lifecycle-engine serve``.
        clients: How many ask at the same time.
        requests: How many requests they send together.
        seed: Draws the pictures, the requests and who leaves when.
        console: Where to print; standard output if not given.

    Returns:
        The exit status: 0 only if nothing is left behind and nobody was left
        without an answer.

    Raises:
        ServerFailed: The server did not start.
    """
    console = console or Console()
    jobs = plan(requests, seed)
    async with running(arguments) as server:
        console.print(f"starting the server and its engine ({' '.join(arguments)})")
        await server.wait_ready()
        return show(await _traffic(server, jobs, clients, console), console)


async def _traffic(
    server: Server, jobs: Sequence[Job], clients: int, console: Console
) -> Findings:
    idle = server.resident()
    ledger = Ledger()
    view = View(server, ledger, console)
    sdk = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none is needed",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )
    model = (await sdk.models.list()).data[0].id
    console.print(f"{len(jobs)} requests to {model} from {clients} clients")
    restarted: list[float] = []
    async with sdk, anyio.create_task_group() as watchers:
        watchers.start_soon(view.follow)
        watchers.start_soon(_kill_once, view, len(jobs), restarted)
        async with anyio.create_task_group() as group:
            for number in range(clients):
                client = Client(
                    sdk=sdk,
                    model=model,
                    ledger=ledger,
                    phase_of=view.phase_of,
                    changed=view.changed,
                )
                group.start_soon(client.work, jobs[number::clients])
        await _quiet(view)
        watchers.cancel_scope.cancel()
    return Findings(
        ledger=ledger,
        status=view.status,
        peak=server.peak_resident(),
        idle=idle,
        needed=ledger.peak_bytes,
        restarted=restarted[0] if restarted else None,
        exit_status=await server.stop(),
    )


async def _kill_once(view: View, requests: int, restarted: list[float]) -> None:
    """Kill the engine when a third of the requests has ended and streams run."""
    while (
        sum(view.ledger.seen.values()) < requests // 3 or view.phases()["streaming"] < 2
    ):
        await view.changed()
    engine = view.status["engine"]
    kill(engine["pid"])
    killed = anyio.current_time()
    view.note(f"SIGKILL to engine no. {engine['incarnation']}, process {engine['pid']}")
    while (
        view.status["engine"]["incarnation"] == engine["incarnation"]
        or not (view.status["engine"]["ready"])
    ):
        await view.changed()
    restarted.append(anyio.current_time() - killed)
    view.note(f"engine no. {view.status['engine']['incarnation']} is ready")


async def _quiet(view: View) -> None:
    """Wait until the server holds nothing any more, or it had time enough."""
    with anyio.move_on_after(QUIET_LIMIT):
        await view.changed()
        while any(left(view.status).values()):
            await view.changed()
