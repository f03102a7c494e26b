"""Admission by slots: until the end, for media until hand-off, and in time or not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from asgi_kit import ScriptedServer, http_scope

from lifecycle import AdmissionTimeout, Gate
from lifecycle_asgi import Admission, MediaProfile, handed_off, lanes, request_of
from lifecycle_asgi.events import client_timeout
from lifecycle_asgi.lanes import Lane

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
OK = {"type": "http.response.start", "status": 200, "headers": []}
TEXT = b'{"prompt": "What is this?"}'
PART = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
PICTURE = json.dumps({"messages": [{"role": "user", "content": [PART]}]}).encode()
# Each image counts one KiB, whatever it is.
SMALL = MediaProfile(
    work_bytes_per_pixel=0, tensor_bytes_per_pixel=1, assumed_pixels=1024
)


class Application:
    """Sends the first part of each answer at once, and the rest when it may.

    Args:
        hands_off: Whether it says so once it has sent nothing yet.
    """

    def __init__(self, *, hands_off: bool = False) -> None:
        self.hands_off = hands_off
        self.entered: list[str] = []
        self.may_begin, self.may_end = anyio.Event(), anyio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        await receive()
        self.entered.append(scope["client"][0])
        if self.hands_off:
            handed_off()
        else:
            await self.may_begin.wait()
        await send(OK)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"b"})


class Clients:
    """Requests under way, each of a client of its own unless it is named."""

    def __init__(self, app: Any, tasks: TaskGroup, **options: Any) -> None:
        self.app = app
        options = {"profile": SMALL, **options}
        self.admission = Admission(app, environment={}, **options)
        self.tasks = tasks
        self.servers: list[ScriptedServer] = []

    async def ask(
        self, body: bytes = TEXT, client: str = "", headers: Any = (), **scope: Any
    ) -> ScriptedServer:
        """Send a request, and let it come as far as it can."""
        server = ScriptedServer(body)
        self.servers.append(server)
        made = http_scope(
            CHAT,
            headers=[(b"content-length", str(len(body)).encode()), *headers],
            client=(client or f"10.0.0.{len(self.servers)}", 1),
            **scope,
        )
        self.tasks.start_soon(self.admission, made, server.receive, server.send)
        await anyio.wait_all_tasks_blocked()
        return server

    def now(self, lane: str = "slots") -> Any:
        """Return the state of a lane."""
        return self.admission.statistics()[lane]


@asynccontextmanager
async def clients_of(app: Any, **options: Any) -> AsyncIterator[Clients]:
    """At the end all may go on, and nothing is held after that."""
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            clients = Clients(app, tasks, **options)
            yield clients
            if isinstance(app, Application):
                app.may_begin.set()
                app.may_end.set()
    for lane in clients.admission.statistics().values():
        assert (lane.slots_in_use, lane.bytes_in_use, lane.waiting) == (0, 0, 0)


async def test_holds_a_slot_until_the_end_of_the_answer() -> None:
    """The first bytes give the memory back, and only the end gives the slot."""
    app = Application()
    async with clients_of(app, slots=1) as clients:
        await clients.ask()
        app.may_begin.set()
        await clients.ask()
        assert len(app.entered) == 1
        assert (clients.now().slots_in_use, clients.now().waiting) == (1, 1)
        assert clients.now("small").slots_in_use == 1  # that of the one that waits
        app.may_end.set()
    assert len(app.entered) == 2
    assert [server.status for server in clients.servers] == [200, 200]


@pytest.mark.parametrize("release", ["hand_off", "end"])
async def test_holds_the_bytes_for_as_long_as_it_is_told(release: str) -> None:
    """Until the first bytes of the answer, or until its end."""
    app = Application()
    async with clients_of(app, release=release) as clients:
        await clients.ask()
        app.may_begin.set()
        await anyio.wait_all_tasks_blocked()
        assert bool(clients.now("small").bytes_in_use) == (release == "end")
        assert clients.servers[0].status == 200


@pytest.mark.parametrize("leaves", [False, True])
async def test_holds_the_bytes_until_what_has_them_is_closed(*, leaves: bool) -> None:
    """A generator that the request owns has them until the middleware closes it."""
    held: list[int] = []

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            yield b"b"
        finally:
            held.append(clients.now("small").bytes_in_use)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        source = request_of(scope).own(parts())
        await send(OK)
        part = {"type": "http.response.body", "body": await anext(source)}
        await send({**part, "more_body": leaves})
        if leaves:
            clients.servers[0].gone.set()
            await anyio.sleep_forever()

    async with clients_of(app, release="end") as clients:
        await clients.ask()
    (nbytes,) = held
    assert nbytes > 0


async def test_gives_the_slot_of_a_client_that_leaves_to_the_next() -> None:
    """Inside, or in the queue: a free slot goes to the next request."""
    app = Application()
    async with clients_of(app, slots=1) as clients:
        first = await clients.ask()
        second = await clients.ask()
        await clients.ask(client="last")
        second.gone.set()
        await anyio.wait_all_tasks_blocked()
        assert clients.now().waiting == 1
        first.gone.set()
        await anyio.wait_all_tasks_blocked()
        assert app.entered == ["10.0.0.1", "last"]


async def test_refuses_by_the_head_when_the_queue_for_slots_is_full() -> None:
    """503 before a byte of the body is read, and the gate counts it."""
    app = Application()
    async with clients_of(app, slots=1, max_waiting=2) as clients:
        for _ in range(3):
            await clients.ask()
        late = ScriptedServer(b"x" * 1000)
        late.on_send = lambda _: unread.append(len(late.messages))
        unread: list[int] = []
        headers = [(b"content-length", b"1000")]
        scope = http_scope(CHAT, headers=headers, client=("late", 1))
        with anyio.fail_after(120):
            await clients.admission(scope, late.receive, late.send)
        assert late.status == 503
        assert b"retry-after" in dict(late.sent[0]["headers"])
        assert unread[0] == 2  # the body, and its end
        assert clients.now().refused == 1
        assert clients.now("small").refused == 0


@pytest.mark.parametrize("max_waiting", [0, 1])
async def test_refuses_by_the_head_only_what_would_not_be_admitted(
    max_waiting: int,
) -> None:
    """A place that is free, in the queue or beyond it, is given."""
    app = Application()
    async with clients_of(app, slots=1, max_waiting=max_waiting) as clients:
        for _ in range(1 + max_waiting):
            assert (await clients.ask()).status is None
        assert (await clients.ask()).status == 503
        assert (clients.now().admitted, clients.now().refused) == (1, 1)


async def test_refuses_a_client_over_its_share_of_the_queue_by_the_head() -> None:
    """429: half of the queue for slots is all that one client gets."""
    app = Application()
    async with clients_of(app, slots=1, max_waiting=4) as clients:
        for _ in range(3):
            await clients.ask(client="crowd")
        assert (await clients.ask(client="crowd")).status == 429
        assert (await clients.ask(client="other")).status is None


async def test_serves_clients_in_turns_of_slots() -> None:
    """A client that came late is next, if the other has had a slot."""
    app = Application()
    app.may_begin.set()
    async with clients_of(app, slots=1) as clients:
        for client in ("crowd", "crowd", "crowd", "other"):
            await clients.ask(client=client)
        app.may_end.set()
    assert app.entered.index("other") < 3


async def test_goes_by_arrival_where_the_order_says_so() -> None:
    """First come, first served, whichever client it is."""
    app = Application()
    app.may_begin.set()
    async with clients_of(app, slots=1, order="fifo") as clients:
        for client in ("crowd", "crowd", "crowd", "other"):
            await clients.ask(client=client)
        app.may_end.set()
    assert app.entered == ["crowd", "crowd", "crowd", "other"]


@pytest.mark.parametrize("hands_off", [False, True])
async def test_limits_media_until_hand_off(hands_off: bool) -> None:
    """One picture is decoded at a time; text does not wait for it."""
    app = Application(hands_off=hands_off)
    async with clients_of(app, media_slots=1) as clients:
        await clients.ask(PICTURE)
        await clients.ask(PICTURE)
        await clients.ask(TEXT)
        large = json.dumps({"prompt": "x" * 100_000}).encode()
        await clients.ask(large)
        if hands_off:
            assert len(app.entered) == 4
            assert clients.now("requests").waiting == 0
        else:
            assert app.entered == ["10.0.0.1", "10.0.0.3", "10.0.0.4"]
            assert clients.now("requests").waiting == 1
            app.may_begin.set()
            await anyio.wait_all_tasks_blocked()
            assert len(app.entered) == 4


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], float("inf")),
        ([(b"x-stainless-timeout", b"12.5")], 12.5),
        ([(b"x-stainless-timeout", b"600"), (b"x-stainless-read-timeout", b"3")], 3.0),
        ([(b"x-stainless-read-timeout", b"NOT_GIVEN")], float("inf")),
        ([(b"x-stainless-read-timeout", b"0")], float("inf")),
        ([(b"x-stainless-timeout", b"nan")], float("inf")),
        ([(b"x-stainless-timeout", b"-1")], float("inf")),
        ([(b"x-stainless-timeout", b"inf")], float("inf")),
    ],
)
def test_reads_when_the_client_gives_up(headers: Any, seconds: float) -> None:
    """The SDKs of OpenAI and Anthropic say so; whatever is no time is none."""
    assert client_timeout({"headers": headers}) == seconds


@pytest.mark.parametrize("limit", ["slots", "media_slots"])
async def test_keeps_no_client_in_the_queue_that_has_given_up(limit: str) -> None:
    """A client that waits a moment is refused then, and its place is another's."""
    app = Application()
    async with clients_of(app, **{limit: 1}, max_wait=600) as clients:
        await clients.ask(PICTURE)
        late = await clients.ask(PICTURE, headers=[(b"x-stainless-timeout", b"0.01")])
        while late.status is None:
            await anyio.wait_all_tasks_blocked()
        assert late.status == 503
        assert len(app.entered) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Seconds that pass when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(lanes, "_now", lambda: clock.now)
    return clock


@pytest.mark.parametrize("order", ["fifo", "fair"])
async def test_refuses_at_once_what_would_come_too_late(
    order: Any, clock: SimpleNamespace
) -> None:
    """An hour a request and two ahead: a client that waits for less than three goes."""
    lane = Lane(Gate(slots=1, max_waiting=9, max_wait=1e6, order=order))
    held = [await lane.admit(0, "a")]
    refused = anyio.Event()

    async def wait(hours: float) -> None:
        try:
            held.append(await lane.admit(0, "a", deadline=clock.now + 3600 * hours))
        except AdmissionTimeout:
            refused.set()

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(wait, 1000)
                await anyio.wait_all_tasks_blocked()
            for _ in range(2):
                clock.now += 3600.0
                held.pop().release()
                await anyio.wait_all_tasks_blocked()
            tasks.start_soon(wait, 3.1)
            await anyio.wait_all_tasks_blocked()
            assert lane.gate.statistics().waiting == 3
            assert not refused.is_set()
            tasks.start_soon(wait, 3.9)
            await refused.wait()
            assert lane.gate.statistics().waiting == 3
            while held:
                held.pop().release()
                await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize(
    ("order", "late"), [("fifo", [1, 2]), ("fair", [2]), ("adaptive", [])]
)
async def test_lets_no_crowd_make_another_client_late(
    order: Any, late: list[int], clock: SimpleNamespace
) -> None:
    """In turns, the first request of a client is next, and the newest may always be."""
    lane = Lane(Gate(slots=1, max_waiting=9, max_wait=1e6, order=order))
    held, refused = [await lane.admit(0, "crowd")], list[int]()

    async def wait(number: int, client: str, hours: float) -> None:
        deadline = clock.now + 3600 * hours
        try:
            held.append(await lane.admit(0, client, deadline=deadline))
        except AdmissionTimeout:
            refused.append(number)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(wait, number, "crowd", 1000)
                await anyio.wait_all_tasks_blocked()
            clock.now += 3600.0
            held.pop().release()
            await anyio.wait_all_tasks_blocked()
            for number in (1, 2):
                tasks.start_soon(wait, number, "other", 2.5)
                await anyio.wait_all_tasks_blocked()
            while len(refused) < len(late):
                await anyio.wait_all_tasks_blocked()
            assert refused == late
            while held:
                held.pop().release()
                await anyio.wait_all_tasks_blocked()


async def test_takes_no_idle_time_for_a_slow_queue(clock: SimpleNamespace) -> None:
    """However rarely clients come that give up: others begin a queue, too."""
    lane = Lane(Gate(slots=1, max_waiting=9, max_wait=1e6, order="fifo"))
    held, refused = [await lane.admit(0, "a")], list[float]()

    async def wait(seconds: float) -> None:
        try:
            held.append(await lane.admit(0, "a", deadline=clock.now + seconds))
        except AdmissionTimeout:
            refused.append(seconds)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for idle in (36_000.0, 0.0):
                for seconds in (float("inf"), 1000.0, 0.0):
                    tasks.start_soon(wait, seconds)
                    await anyio.wait_all_tasks_blocked()
                while 0.0 not in refused:
                    await anyio.wait_all_tasks_blocked()
                assert refused == [0.0]
                refused.clear()
                while held:
                    held.pop().release()
                    await anyio.wait_all_tasks_blocked()
                clock.now += idle
                held.append(await lane.admit(0, "a"))
            held.pop().release()


async def test_says_at_start_which_slots_make_no_sense() -> None:
    """A limit is not negative, and no order is a name; 0 is unlimited, as in serve."""
    for options in ({"slots": -1}, {"media_slots": 0}, {"order": "lifo"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Admission(Application(), environment={}, **options)
    environment = {"LIFECYCLE_SLOTS": "2", "LIFECYCLE_ORDER": "fifo"}
    admission = Admission(Application(), environment=environment)
    assert admission.statistics()["slots"].slots == 2
    unlimited = Admission(Application(), environment={"LIFECYCLE_SLOTS": "0"})
    assert "slots" not in unlimited.statistics()


@pytest.mark.parametrize("seconds", [3600.0, float("inf")])
async def test_waits_no_longer_than_the_gate_says(seconds: float) -> None:
    """A patient client is refused when the longest wait of the gate is over."""
    lane = Lane(Gate(slots=1, max_wait=0.001))
    held = await lane.admit(0, "a")
    with anyio.fail_after(120), pytest.raises(AdmissionTimeout):
        await lane.admit(0, "b", deadline=anyio.current_time() + seconds)
    held.release()
