"""What all checks share: the server, its baselines, and how its work is seen."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio

from lifecycle_tools.check.client import Address, Response, ask
from lifecycle_tools.check.payloads import FIELDS, PATHS, generation

if TYPE_CHECKING:
    from lifecycle_tools.check.process import ServerProcess

# Gauges of running requests, as servers name them on /metrics.
GAUGES = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "lifecycle_engine_requests_running",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
GRACE = 2.0


class CannotCheck(Exception):
    """There is no honest request, or no other client, to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to send, and how much of it.

    Args:
        model: the name that requests carry.
        api: ``chat`` or ``messages``.
        seconds: the longest that one answer is waited for.
        concurrency: requests of the burst.
        clients: clients that leave together.
        tokens: tokens of a request whose client leaves.
        turns: how often clients that stay are compared with clients that leave.
        image: whether to send pictures.
        more: fields that each request has besides.
        gauge: the name on ``/metrics`` of the number of running requests.
        metrics: where ``/metrics`` is, if not at the server's address.
        neighbour_key: the API key of another client, where keys tell them apart.
    """

    model: str = "default"
    api: str = "chat"
    seconds: float = 15.0
    concurrency: int = 64
    clients: int = 4
    tokens: int = 512
    turns: int = 3
    image: bool = True
    more: Mapping[str, object] = field(default_factory=dict)
    gauge: str | None = None
    metrics: Address | None = None
    neighbour_key: str | None = field(default=None, repr=False)

    def neighbour(self, address: Address) -> Address:
        """Return *address* as another client asks it.

        By the key of that client, or from another address of this host.

        Raises:
            CannotCheck: there is neither.
        """
        if self.neighbour_key is not None:
            return address.with_key(self.neighbour_key)
        if address.host == "localhost" or address.host.startswith("127."):
            return replace(address, source="127.0.0.2")
        raise CannotCheck(
            f"{address.host} cannot tell another client from this one; give the key of "
            "another with --neighbour-key, or name the server by 127.0.0.1"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a server is, as far as it can be seen.

    Args:
        latency: seconds that an honest request takes.
        cpu: CPU seconds a second, on the same host only.
        running: requests that run by its own count.
    """

    latency: float
    cpu: float | None = None
    running: float | None = None


class Target:
    """A server under test.

    Raises:
        ProcessLookupError: there is no process *pid*.
        ModuleNotFoundError: *pid* is given, and psutil is missing.
    """

    def __init__(
        self, address: Address, settings: Settings, *, pid: int | None = None
    ) -> None:
        self.address = address
        self.settings = settings
        self.process = None if pid is None else _process(pid)
        self.idle = Load(0.0)

    @property
    def path(self) -> str:
        """The path of the API under test."""
        return PATHS[self.settings.api]

    def request(
        self,
        *,
        tokens: int,
        stream: bool,
        images: tuple[bytes, ...] = (),
        length: int | None = None,
    ) -> bytes:
        """Return a whole request for *tokens* tokens.

        With a *length*, that of its whole body: the rest, which is space, is missing.
        """
        body = generation(
            self.settings.model,
            api=self.settings.api,
            tokens=tokens,
            stream=stream,
            images=images,
            more=self.settings.more,
        )
        return self.address.post(self.path, body, length=length)

    async def honest(self) -> Response:
        """Send one small request, and wait for its response.

        Cancellation: the connection is closed.
        """
        return await ask(
            self.address,
            self.request(tokens=4, stream=False),
            timeout=self.settings.seconds,
        )

    async def running(self) -> float | None:
        """Return the server's own count of running requests, where it has one.

        Cancellation: the connection is closed.
        """
        address = self.settings.metrics or self.address
        response = await ask(address, address.head("GET", "/metrics"), timeout=2.0)
        if response.status != 200:
            return None
        names = (self.settings.gauge,) if self.settings.gauge else GAUGES
        return _gauge(response.body.decode("utf-8", "replace"), names)

    async def load(self) -> Load:
        """Measure how busy the server is now, first without asking it for work.

        Cancellation: the measurement ends.
        """
        running = await self.running()
        cpu = await self.process.cpu_rate(1.0) if self.process else None
        response = await self.honest()
        failed = response.status != 200
        latency = self.settings.seconds if failed else response.seconds
        return Load(latency, cpu, running)

    async def measure_idle(self) -> None:
        """Measure the idle server, which serves an honest request.

        Raises:
            CannotCheck: it does not.

        Cancellation: the measurement ends.
        """
        try:
            with anyio.fail_after(self.settings.seconds):
                await anyio.aclose_forcefully(await self.address.connect())
        except ssl.SSLCertVerificationError as error:
            raise CannotCheck(
                f"the certificate is not trusted ({error.verify_message}); name the "
                "file of its issuer in the variable SSL_CERT_FILE"
            ) from None
        except OSError:  # of which TimeoutError is one
            raise CannotCheck(
                f"no server accepts connections at {self.address.host} port "
                f"{self.address.port}; start it, or correct the URL"
            ) from None
        with anyio.move_on_after(self.settings.seconds):
            await self._started()
        problem = self._problem(await self.honest())
        if problem:
            raise CannotCheck(problem)
        # The first requests may be slow; a baseline of them would hide what comes.
        loads = [await self.load() for _ in range(3)]
        self.idle = Load(
            min(each.latency for each in loads),
            min((each.cpu for each in loads if each.cpu is not None), default=None),
            min(
                (each.running for each in loads if each.running is not None),
                default=None,
            ),
        )

    async def _started(self) -> None:
        while (await self.honest()).status == 503:  # noqa: ASYNC110 - another process
            await anyio.sleep(0.2)

    def _problem(self, response: Response) -> str:
        status, path = response.described, self.path
        if response.status in (401, 403):
            return f"the server answers {status}; give a key with --api-key"
        if response.status in (404, 405):
            return (
                f"the server answers {status} at {path}: it has no such API, or no "
                f"model {self.settings.model!r}; correct the URL, --api or --model"
            )
        if not response.status:
            seconds = self.settings.seconds
            return f"no response at {path} in {seconds:g} s; wait longer with --seconds"
        if response.status in (429, 503):
            return f"the server answers {status}; it is starting or busy, so wait"
        if response.status != 200:
            model = self.settings.model
            return (
                f"the server answers {status} to an honest request for the model "
                f"{model!r}; correct --model or --api"
            )
        needed = FIELDS[self.settings.api]
        try:
            found = needed in json.loads(response.content)
        except (ValueError, TypeError):
            found = False
        if found:
            return ""
        return f"the response at {path} has no {needed!r}: this is no such API"

    async def settle(self) -> bool:
        """Wait until the server is idle again; False when it stays busy.

        Cancellation: the wait ends.
        """
        until = time.monotonic() + 4 * self.settings.seconds
        while time.monotonic() < until:
            now = await self.load()
            cpu_idle = now.cpu is None or now.cpu <= (self.idle.cpu or 0) + 0.05
            counted = (now.running or 0) <= (self.idle.running or 0)
            if cpu_idle and counted and now.latency <= self.slow_after:
                return True
            await anyio.sleep(0.2)
        return False

    @property
    def slow_after(self) -> float:
        """Seconds after which an honest request counts as held up."""
        return 3 * self.idle.latency + 1.0


def _process(pid: int) -> ServerProcess:
    # psutil is needed for this alone.
    from lifecycle_tools.check.process import ServerProcess

    return ServerProcess(pid)


def _gauge(text: str, names: tuple[str, ...]) -> float | None:
    found = None
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in names:
            found = (found or 0.0) + float(value)
    return found
