"""One engine process with its client, from the spawn until it is reaped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from lifecycle import EngineLost

from . import _address
from .arena import Arena
from .client import EngineClient
from .process import EngineProcess

# sockaddr_un takes 108 bytes with the final zero.
_MAX_PATH = 107


@dataclass(frozen=True, slots=True)
class Settings:
    """What every incarnation of one engine is started with; see `ZmqEngine`."""

    argv: Sequence[str]
    env: Mapping[str, str] | None
    pass_fds: Sequence[int]
    directory: Path | None
    ready_timeout: float
    arena: Callable[[], Arena | None]


class Incarnation:
    """Runs one process to its end.

    Args:
        number: What every message of it carries.
        settings: How to start it.
        retry_after: Seconds that its waiters are told when it dies.
        changed: Called when it began to serve.

    Attributes:
        process: The process, once spawned.
        client: The client, while there is one.
        reason: Why it ended, in one word.
        output: The end of what it wrote.
        start_seconds: How long it took until it served; ``None`` if it never did.
        served_seconds: For how long it served.
    """

    def __init__(
        self,
        number: int,
        settings: Settings,
        *,
        retry_after: float,
        changed: Callable[[], None],
    ) -> None:
        self._number = number
        self._settings = settings
        self._retry_after = retry_after
        self._changed = changed
        self._began = anyio.current_time()
        self.process: EngineProcess | None = None
        self.client: EngineClient | None = None
        self.reason = "starting"
        self.output = ""
        self.start_seconds: float | None = None
        self.served_seconds = 0.0

    @property
    def why(self) -> str:
        """Why it takes no requests, in one word, from the moment that it does not."""
        lost = self.client.lost if self.client is not None else None
        return lost or self.reason

    async def run(self) -> None:
        """Spawn, serve, reap; an error of any of it is a reason, never raised.

        Cancellation: the process is killed and reaped, its waiters are told.
        """
        try:
            with _socket_directory(self._settings.directory) as directory:
                await self._run_in(directory)
        except Exception as error:  # noqa: BLE001
            self.reason = "spawn_failed" if self.process is None else "link_fault"
            self.output += f"{type(error).__name__}: {error}"
        if self.start_seconds is not None:
            life = anyio.current_time() - self._began
            self.served_seconds = life - self.start_seconds

    async def _run_in(self, directory: Path) -> None:
        address = f"ipc://{directory}/engine"
        arena = self._settings.arena()
        process = self.process = self._spawn(address, arena)
        try:
            async with EngineClient(
                address,
                incarnation=self._number,
                retry_after=self._retry_after,
                arena=arena,
            ) as client:
                self.client = client
                await self._watch(process, client, directory)
        finally:
            self.client = None
            await process.close()  # noqa: ASYNC102 - shielded and bounded in there
            self.output = process.output
            # Not before: it may have been reading until it was reaped.
            if arena is not None and process.reaped:
                arena.take_back_all()

    def _spawn(self, address: str, arena: Arena | None) -> EngineProcess:
        inherited: dict[str, int] = {}
        if arena is not None and arena.descriptor is not None:
            inherited["arena"] = arena.descriptor
        endpoint = _address.join(address, inherited)
        tail = ["--endpoint", endpoint, "--incarnation", str(self._number)]
        return EngineProcess(
            [*self._settings.argv, *tail],
            env=self._settings.env,
            pass_fds=[*self._settings.pass_fds, *inherited.values()],
        )

    async def _watch(
        self, process: EngineProcess, client: EngineClient, directory: Path
    ) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.drain)
            tasks.start_soon(self._await_ready, client, directory)
            tasks.start_soon(self._kill_when_lost, process, client)
            await process.wait()
            # What it said before it died was said: a finish that is there counts.
            client.drain()
            client.lose(process.reap())
            self.reason = client.lost or "exit"
            tasks.cancel_scope.cancel()

    async def _await_ready(self, client: EngineClient, directory: Path) -> None:
        try:
            with anyio.fail_after(self._settings.ready_timeout):
                await client.wait_ready()
        except EngineLost:
            return
        except TimeoutError:
            client.lose("start_timeout")
            return
        # Connected: nobody else shall find the socket, and nothing is left in the
        # file system should we be killed.
        shutil.rmtree(directory, ignore_errors=True)
        self.start_seconds = anyio.current_time() - self._began
        self._changed()

    async def _kill_when_lost(
        self, process: EngineProcess, client: EngineClient
    ) -> None:
        # An engine that broke the protocol, or hung up, is not to be reasoned with.
        await client.wait_lost()
        process.kill()


@contextmanager
def _socket_directory(parent: Path | None) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="lifecycle-", dir=parent))
    try:
        path = len(str(directory / "engine").encode())
        if path > _MAX_PATH:
            raise OSError(
                f"the path of the engine's socket has {path} bytes, the system takes "
                f"{_MAX_PATH}; pass a shorter directory="
            )
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
