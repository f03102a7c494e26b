"""One run of the demo, from the start of the server to the exit status.

The server is a process, the clients are tasks of this one. The engine is killed
once in the middle; at the end everything is looked for that might be left.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import openai
from rich.console import Console

from .clients import Client, DemoStats
from .report import Findings, left, show
from .server import Server, ServerFailed, kill, lives, running
from .traffic import Job, plan
from .view import View

QUIET_LIMIT = 20.0
"""Seconds after the last answer for the last clean-up to be done."""

STREAMS_TO_CUT = 4
"""Requests that the engine should be decoding when it is killed."""


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
        arguments: Further arguments for ``lifecycle serve``.
        clients: How many ask at the same time.
        requests: How many requests they send together.
        seed: Draws the pictures, the requests and the disconnects.
        console: Where to print; standard output if not given.

    Returns:
        The exit status: 0 only if nothing is left behind and no client was left
        without an answer.

    Raises:
        ServerFailed: The server did not start, or ended by itself.
    """
    console = console or Console()
    jobs = plan(requests, seed)
    console.print("Starting the server and its engine ...")
    async with running(arguments) as server:
        await server.wait_ready()
        try:
            findings = await _traffic(server, jobs, clients, console)
        except BaseExceptionGroup as group:
            failed = group.subgroup(ServerFailed)
            if failed is None:
                raise
            raise ServerFailed(f"the server failed:\n{server.log_tail()}") from None
    return show(findings, console)


async def _traffic(
    server: Server, jobs: Sequence[Job], clients: int, console: Console
) -> Findings:
    idle = server.resident()
    stats = DemoStats()
    view = View(server, stats, console)
    restarted: list[float] = []
    async with _sdk(server) as sdk, anyio.create_task_group() as watchers:
        model = (await sdk.models.list()).data[0].id
        console.print(f"{len(jobs)} requests to {model} from {clients} clients")
        watchers.start_soon(view.follow)
        watchers.start_soon(_kill_once, view, len(jobs), restarted)
        async with anyio.create_task_group() as group:
            for number in range(clients):
                client = Client(
                    sdk=sdk,
                    model=model,
                    stats=stats,
                    phase_of=view.phase_of,
                    changed=view.changed,
                )
                group.start_soon(client.work, jobs[number::clients])
        await _quiet(view)
        watchers.cancel_scope.cancel()
    return Findings(
        stats=stats,
        status=view.status,
        peak=server.peak_resident(),
        idle=idle,
        needed=stats.peak_bytes,
        requests=len(jobs),
        restarted=restarted[0] if restarted else None,
        exit_status=await server.stop(),
        outlived=lives(view.status["engine"]["pid"]),
    )


def _sdk(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none is needed",
        # Seen and counted here, where the SDK would keep it to itself.
        max_retries=0,
        # A proxy from the environment has no say in a demo.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


async def _kill_once(view: View, requests: int, restarted: list[float]) -> None:
    """Kill the engine in the middle of the run, and of some streams."""
    while not _in_the_middle(view, requests):
        await view.changed()
    before = view.status["engine"]
    kill(before["pid"])
    killed = anyio.current_time()
    view.note(f"SIGKILL to engine no. {before['incarnation']}")
    while True:
        await view.changed()
        now = view.status["engine"]
        if now["incarnation"] != before["incarnation"] and now["ready"]:
            break
    restarted.append(anyio.current_time() - killed)
    view.note(f"engine no. {now['incarnation']} is ready")


def _in_the_middle(view: View, requests: int) -> bool:
    if view.ended < requests // 3:
        return False
    # A fast engine may never decode that many at a time.
    late = view.ended > requests * 2 // 3
    return view.running >= (1 if late else STREAMS_TO_CUT)


async def _quiet(view: View) -> None:
    """Wait until the server holds nothing any more, or it had time enough."""
    with anyio.move_on_after(QUIET_LIMIT):
        await view.changed()
        while any(left(view.status).values()):
            await view.changed()
