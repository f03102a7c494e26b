"""`lifecycle serve` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Mapping

import openai
import psutil
from http_kit import ENV

CLI = [sys.executable, "-m", "lifecycle_engine.cli"]


class Served:
    """A server process that has announced itself."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        address: str,
        admin: str,
        said: str = "",
    ) -> None:
        self.process, self.said = process, said
        self.admin = admin  # of the operator's pages; empty if they are off
        self.address = address
        self.port = int(address.rpartition(":")[2])

    def client(self) -> openai.AsyncOpenAI:
        """The real SDK."""
        url = f"{self.address}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=120)

    async def exit(self, number: int | None = None, within: float = 60.0) -> int:
        """Send a signal, if one is given, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        async with asyncio.timeout(within):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def served(
    *options: str,
    runner: str = "sim",
    quiet: bool = True,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Served]:
    """Run the command and wait for its line."""
    argv = [*CLI, "serve", "--runner", runner, "--port", "0", *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=pipe, stderr=pipe, env={**ENV, **(env or {})}
    )
    family = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        async with asyncio.timeout(600):
            line = (await process.stdout.readline()).decode()
        assert "ready at http" in line, (await process.stderr.read()).decode()
        children = family.children(recursive=True)
        assert children, "there is no engine process"
        said = admin = ""
        if ("--admin-listen", "off") not in itertools.pairwise(options):
            async with asyncio.timeout(60):
                said = (await process.stdout.readline()).decode()
            admin = said.split()[-1]
        yield Served(process, line.split()[-1], admin, said)
        text = (await process.stderr.read()).decode() if quiet else ""
        # A refusal is no error; `Admission` has a line for it.
        errors = [line for line in text.splitlines() if " refused with " not in line]
        assert errors == [], text
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert not alive
