"""`bytes="auto"`: the budget of requests, learned from the memory that they take."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope
from cgroup_kit import memory_group
from hypothesis import example, given, strategies as st

from lifecycle import Gate
from lifecycle.testing import simulate, simulate_trio
from lifecycle_asgi import Admission, AdmissionSettings, MemoryEstimate, admission
from lifecycle_asgi.learned_budget import BudgetController, LearnedBudget, memory_use
from lifecycle_asgi.memory_limit import MemoryLimit, default_budget, memory_limit
from lifecycle_engine import ConfigError, load_config
from lifecycle_tools.proxy import Upstream, create_app

MIB = 2**20


class Windows:
    """A controller of 1,000 bytes, and windows of a second for it."""

    def __init__(self, floor: int = 100, ceiling: int = 500) -> None:
        self.controller = BudgetController(1000, floor=floor, ceiling=ceiling)
        self.now = 0.0

    def see(
        self, used: int, held: int, *, binding: bool = True, wait: float = 1
    ) -> int:
        """End a window; return the budget."""
        self.now += wait
        return self.controller.observe(self.now, used, held, binding=binding)


def test_falls_above_085_and_rises_below_075_while_requests_wait() -> None:
    """To 0.7 of itself, and by a tenth of the ceiling."""
    windows = Windows()
    assert windows.controller.budget == 500
    assert windows.see(850, 500) == 500
    assert windows.see(851, 500) == 350
    assert windows.see(750, 300) == 350
    assert windows.see(749, 300, binding=False) == 350
    assert [windows.see(749, 300) for _ in range(4)] == [400, 450, 500, 500]


def test_falls_once_until_requests_hold_no_more_than_that() -> None:
    """What is held already takes its time to come back."""
    windows = Windows()
    assert [windows.see(900, held) for held in (500, 500, 400, 351)] == [350] * 4
    assert windows.see(900, 350) == 244


def test_never_shrinks_below_the_largest_request() -> None:
    """Which no release would ever let in."""
    windows = Windows(floor=120)
    assert [windows.see(999, 1) for _ in range(9)][-1] == 120
    assert Windows(floor=600).see(999, 1) == 500


def test_memory_that_stays_without_requests_does_not_count_for_ever() -> None:
    """A leak, or an allocator that keeps what it has: not the requests' doing."""
    windows = Windows()
    for _ in range(4):
        windows.see(900, 100)
    assert windows.controller.budget == 118
    for _ in range(8):  # idle, and as much is in use as before
        windows.see(900, 0)
    assert windows.controller.budget == 500
    assert windows.see(940, 400) == 500
    assert windows.see(951, 400) == 350  # half of the rest is theirs
    assert windows.see(924, 300) == 400


def test_an_idle_time_is_as_many_windows_as_it_has_seconds() -> None:
    """Nothing ends them while no request comes."""
    windows = Windows()
    for _ in range(9):
        windows.see(999, 100)
    assert windows.controller.budget == 100
    assert windows.see(100, 0, wait=3.5) == 250
    assert windows.see(100, 0, wait=3600) == 500


def test_the_baseline_falls_at_once_and_rises_after_eight_idle_windows() -> None:
    """One that is measured while memory is still being freed is none."""
    windows = Windows()
    for used in [300, *[900] * 7]:
        windows.see(used, 0)
    assert windows.see(860, 100) == 350
    windows.see(900, 0)
    windows.see(900, 0)
    assert windows.see(940, 100) >= 400
    windows.see(300, 0)
    budget = windows.controller.budget
    assert windows.see(860, 100) < budget


seen = st.tuples(
    st.integers(0, 2000), st.integers(0, 900), st.booleans(), st.floats(0, 100)
)


@example(1, 9, [(999, 1, False, 1.0)] * 9)
@given(st.integers(1, 600), st.integers(1, 600), st.lists(seen, max_size=60))
def test_stays_between_floor_and_ceiling_and_recovers(floor, ceiling, history) -> None:
    """Whatever happened, the whole budget is back ten windows after the pressure."""
    windows = Windows(floor, ceiling)
    for used, held, binding, wait in history:
        budget = windows.see(used, held, binding=binding, wait=wait)
        assert min(floor, ceiling) <= budget <= ceiling
    for _ in range(10):
        windows.see(500, 100)
    assert windows.controller.budget == ceiling


V1 = "cache 9\nrss 1\nshmem 2\ntotal_cache 9\ntotal_rss 70\ntotal_shmem 7\ntotal_rss_huge 5\n"


@pytest.mark.parametrize(
    ("groups", "folder", "file", "stat"),
    [
        ("0::/a\n", "a", "memory.max", "anon 70\nfile 900\nshmem 7\nanon_thp 5\n"),
        ("5:memory:/a\n", "memory/a", "memory.limit_in_bytes", V1),
    ],
    ids=["version 2", "version 1"],
)
def test_reads_what_this_cgroup_cannot_give_back(
    tmp_path: Path, groups: str, folder: str, file: str, stat: str
) -> None:
    """No page cache; and not what the host, or the group around it, is short of."""
    made = tmp_path / "sys/fs/cgroup" / folder
    made.mkdir(parents=True)
    (made / file).write_text("1000\n")
    (made / "memory.stat").write_text(stat)
    (made.parent / "memory.stat").write_text(stat.replace("70", "990"))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 0 kB\n")
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.bytes, memory_use(limit, tmp_path)) == (1000, 77)
    (made / "memory.stat").write_text("anon 70\n")
    assert memory_use(limit, tmp_path) is None
    (made / "memory.stat").unlink()
    assert memory_use(limit, tmp_path) is None


def test_reads_what_this_process_has_where_no_group_is_limited() -> None:
    """Anonymous and shared memory of it alone, in little time."""
    machine = MemoryLimit(2**40, "this machine")
    before = memory_use(machine)
    assert before is not None
    kept = bytearray(b"x") * (64 * MIB)
    after = memory_use(machine)
    assert after is not None
    assert after - before > 60 * MIB
    del kept


class Machine:
    """A limit of 1,000 MiB, what is in use of it, and a clock."""

    def __init__(self) -> None:
        self.used: int | None = 0
        self.now = 0.0
        self.reads = 0
        self.broken = False

    def use(self, limit: MemoryLimit) -> int | None:
        self.reads += 1
        if self.broken:
            raise ArithmeticError
        return None if self.used is None else self.used * MIB

    def clock(self) -> float:
        return self.now

    def options(self) -> dict[str, Any]:
        limit = MemoryLimit(1000 * MIB, "this cgroup")
        return {"limit": limit, "use": self.use, "clock": self.clock}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What `Admission` then has for its learned budgets."""
    machine = Machine()
    learned = partial(LearnedBudget, **machine.options())
    monkeypatch.setattr(admission, "LearnedBudget", learned)
    return machine


def test_resizes_the_gate_once_a_second_and_says_so(caplog) -> None:
    """And reads the memory as often, however many requests come."""
    caplog.set_level("INFO", logger="lifecycle")
    gate, machine = Gate(bytes=500 * MIB), Machine()
    learned = LearnedBudget(gate, floor=200 * MIB, **machine.options())
    assert caplog.messages[0] == (
        "Admission: a learned budget, 500 MiB at first and at most and 200 MiB at least "
        "for requests that the application works on, from 1000 MiB that this cgroup has"
    )
    lease = gate.try_admit(bytes=300 * MIB)
    machine.used, reads = 900, machine.reads
    for machine.now in (0.5, 1.0, 1.2, 1.9):
        learned.observe()
    assert gate.statistics().bytes == 350 * MIB
    assert machine.reads == reads + 1
    assert caplog.messages[1] == (
        "Admission: 350 MiB for requests, after 500 MiB: 900 of 1000 MiB of memory are "
        "in use, and requests hold 300 MiB"
    )
    machine.used = None
    for machine.now in (3.0, 4.0, 62.0):
        learned.observe()
    assert "unreadable" in caplog.messages[2]
    assert len(caplog.messages) == 3
    assert gate.statistics().bytes == 350 * MIB
    lease.release()


@pytest.mark.anyio
async def test_a_request_that_waited_within_the_window_is_enough_to_rise() -> None:
    """Though none waits at its end; and so is one that was refused."""
    gate, machine = Gate(bytes=500, max_waiting=1), Machine()
    learned = LearnedBudget(gate, floor=100, **machine.options())

    def window(used: int) -> int | None:
        machine.used, machine.now = used, machine.now + 1
        learned.observe()
        return gate.statistics().bytes

    held = gate.try_admit(bytes=100)
    assert [window(900), window(900), window(100)] == [350, 244, 244]
    more = gate.try_admit(bytes=144)
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            (await gate.admit(bytes=144)).release()

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        learned.observe()
        more.release()
    assert window(100) == 294
    assert window(100) == 294
    with pytest.raises(Exception, match="full"):
        gate.try_admit(bytes=200)
    assert window(100) == 344
    held.release()


def working(works: anyio.Event | None = None, answer: bytes = b"x") -> Any:
    """Return an application that answers, after *works*."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if works is not None:
            await works.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    return app


async def ask(app: Any) -> int:
    """Send a request; return the status."""
    server = ScriptedServer(b"x" * 10)
    del server.messages[-1]
    server.messages[-1]["more_body"] = False
    scope = http_scope(headers=[(b"content-length", b"10")])
    scope["method"] = "POST"
    with anyio.fail_after(60):
        await app(scope, server.receive, server.send)
    return int(server.sent[0]["status"])


async def arrive(tasks: Any, app: Any, statuses: list[int], count: int = 1) -> None:
    """Send requests that note their statuses, each once the one before it waits."""

    async def asking() -> None:
        statuses.append(await ask(app))

    for _ in range(count):
        tasks.start_soon(asking)
        await anyio.wait_all_tasks_blocked()


def price(*needed: int) -> Any:
    """Return one for requests that need these bytes, one after the other."""
    left = [*needed]
    return lambda *_: MemoryEstimate(work=left.pop(0))


@pytest.mark.anyio
async def test_a_request_larger_than_the_budget_is_served_alone(
    machine: Machine,
) -> None:
    """Also one that waited while the budget fell: the settings permit it."""
    works, most = anyio.Event(), default_budget() * 12 // 16
    app = Admission(
        working(works), environment={}, bytes="auto", price=price(100, most, most)
    )
    statuses = list[int]()
    async with anyio.create_task_group() as tasks:
        await arrive(tasks, app, statuses, 2)
        assert app.statistics()["requests"].waiting == 1
        machine.used, machine.now = 900, 1.0
        await arrive(tasks, app, statuses)  # ends the window
        state = app.statistics()["requests"]
        assert state.bytes == int(most * 0.7)
        assert state.waiting == 2
        works.set()
    assert statuses == [200] * 3
    assert app.statistics()["requests"].bytes_in_use == 0


@pytest.mark.anyio
@pytest.mark.parametrize("broken", [False, True], ids=["read", "unreadable"])
async def test_a_release_ends_a_window(machine: Machine, *, broken: bool) -> None:
    """No task measures. What a request held comes back even if that fails."""
    works, most = anyio.Event(), default_budget() * 12 // 16
    app = Admission(
        working(works),
        environment={"LIFECYCLE_BYTES": "Auto"},
        price=price(100),
    )
    with pytest.raises(ExceptionGroup) if broken else nullcontext():
        async with anyio.create_task_group() as group:
            group.start_soon(ask, app)
            await anyio.wait_all_tasks_blocked()
            assert app.statistics()["requests"].bytes_in_use > 0
            machine.used, machine.now, machine.broken = 900, 1.0, broken
            works.set()
    state = app.statistics()["requests"]
    assert state.bytes == (most if broken else int(most * 0.7))
    assert state.bytes_in_use == 0


@pytest.mark.anyio
@pytest.mark.parametrize("at", [2, 3], ids=["on entry", "at the end"])
async def test_a_failed_measurement_keeps_nothing_of_a_request(
    machine: Machine, at: int
) -> None:
    """Neither its slot, its place among those of its client, nor its bytes."""
    app = Admission(
        working(answer=b""),
        environment={},
        bytes="auto",
        slots=1,
        per_client=1,
        price=price(100, 100),
    )
    learn, calls = app._learn, 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise ArithmeticError
        learn()

    app._learn = fail
    with pytest.raises(ArithmeticError) as caught:
        await ask(app)
    assert [each.bytes_in_use for each in app.statistics().values()] == [0] * 4
    assert app.statistics()["slots"].slots_in_use == 0
    assert await ask(app) == 200
    assert all(not each.lost for each in app.statistics().values())
    del caught


@pytest.mark.anyio
async def test_a_budget_that_falls_and_rises_at_once_refuses_nobody(
    machine: Machine,
) -> None:
    """Before the task of a request that was too large has run, where a loop is busy."""
    works, most = anyio.Event(), default_budget() * 12 // 16
    app = Admission(
        working(works), environment={}, bytes="auto", price=price(100, most)
    )
    statuses = list[int]()
    async with anyio.create_task_group() as tasks:
        await arrive(tasks, app, statuses, 2)
        _, _, requests = app.gates
        requests.resize(bytes=most // 2)
        requests.resize(bytes=most)
        works.set()
    assert statuses == [200] * 2


@pytest.mark.parametrize("run", [partial(simulate, early_timers=0.0), simulate_trio])
def test_a_falling_budget_neither_shortens_nor_prolongs_a_wait(
    machine: Machine, run: Any
) -> None:
    """Though the queue is slow: only a client's own timeout is a reason to give up."""

    async def main() -> tuple[list[int], list[float]]:
        works, most = anyio.Event(), default_budget() * 12 // 16
        app = Admission(
            working(works),
            environment={},
            bytes="auto",
            max_wait=2.0,
            price=price(most // 2, most * 6 // 10, most, most, most),
        )
        statuses, waits = list[int](), list[float]()

        async def asking() -> None:
            began = anyio.current_time()
            statuses.append(await ask(app))
            waits.append(anyio.current_time() - began)

        *_, requests = app.gates
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(asking)
                await anyio.sleep(0.01)
            await anyio.sleep(1.0)
            requests.resize(bytes=most * 7 // 10)
            await anyio.sleep(0.5)
            assert requests.statistics().waiting == 4
            await anyio.sleep(1.0)
            works.set()
        return statuses, waits

    statuses, waits = run(main, seed=1).value
    assert statuses == [503] * 4 + [200]
    assert all(abs(wait - 2.0) < 0.1 for wait in waits[:4]), waits


def test_begins_at_the_default_and_shrinks_to_the_largest_body_at_most(caplog) -> None:
    """What is said at the start, in one line."""
    caplog.set_level("INFO", logger="lifecycle")
    app = Admission(working(), environment={}, bytes="auto", max_body=MIB)
    most = default_budget() * 12 // 16
    assert app.statistics()["requests"].bytes == most
    (line,) = caplog.messages
    assert f"{most / MIB:.0f} MiB at first and at most and 3 MiB at least" in line
    assert AdmissionSettings(bytes="auto").budget == default_budget()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"shared": "/x"},
            "for one process, and shared='/x' is for several; give a nu",
        ),
        (
            {"gates": {"requests": Gate(bytes=9)}},
            "gates= gives requests; give a number",
        ),
    ],
    ids=["shared", "gates"],
)
def test_refuses_gates_that_are_not_its_own(options: dict[str, Any], said: str) -> None:
    """With the value, the limit and the remedy."""
    with pytest.raises(ValueError, match="bytes='auto'") as caught:
        Admission(working(), environment={}, bytes="auto", **options)
    assert said in str(caught.value)
    Admission(working(), environment={}, bytes="auto", gates={"slots": Gate(slots=9)})


def test_the_engine_of_this_package_refuses_to_learn() -> None:
    """`lifecycle serve` sizes its shared memory by the budget, and says what to give."""
    with pytest.raises(ConfigError, match="'auto' is refused: give a size") as caught:
        load_config(environment={"LIFECYCLE_BYTES": "auto"})
    assert "LIFECYCLE_BYTES" in str(caught.value)


def test_the_proxy_learns(caplog) -> None:
    """It has the settings of `Admission`, and its memory to itself."""
    caplog.set_level("INFO", logger="lifecycle")
    create_app(Upstream("http://127.0.0.1:1"), environment={"LIFECYCLE_BYTES": "auto"})
    assert "a learned budget" in caplog.text


def test_refuses_a_system_that_says_nothing_of_its_memory() -> None:
    """A budget that is learned from nothing is none."""
    machine = Machine()
    machine.used = None
    with pytest.raises(ValueError, match="such as LIFECYCLE_BYTES=8GiB"):
        LearnedBudget(Gate(bytes=9), floor=1, **machine.options())


def test_warns_of_several_workers(caplog, monkeypatch) -> None:
    """Each of them would begin with what there is for all."""
    monkeypatch.setitem(sys.modules, "gunicorn.arbiter", ModuleType("arbiter"))
    Admission(working(), environment={}, bytes="auto")
    assert "set LIFECYCLE_BYTES to a number, and LIFECYCLE_SHARED" in caplog.text


SERVER = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import anyio, uvicorn
from lifecycle_asgi import Admission, MemoryEstimate

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    taken = bytearray(b"x") * (3 * 4 * 2**20)  # three times what is charged
    await anyio.sleep(3.0)
    headers = [(b"content-length", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x"})

options = {"bytes": "auto"} if sys.argv[2] == "auto" else {}
app = Admission(
    app, price=lambda *_: MemoryEstimate(work=4 * 2**20), max_wait=60.0, **options
)
uvicorn.run(app, fd=int(sys.argv[3]), lifespan="off", log_level="error")
"""
CLIENTS = 48
RAMP = 0.3
SECONDS = 25.0


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of 512 MiB."""
    with memory_group(512 * MIB) as made:
        yield made


def ask_again_and_again(port: int, number: int) -> list[int | None]:
    """Return the statuses of one client's requests; ``None`` where the server died."""
    end, found = time.monotonic() + SECONDS, list[int | None]()
    time.sleep(RAMP * number)
    while time.monotonic() < end and None not in found:
        with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as client:
            try:
                client.request("POST", "/", b"x")
                found.append(client.getresponse().status)
            except (OSError, HTTPException):
                found.append(None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed", "auto"])
def test_requests_of_three_times_their_estimate_end_no_server_that_learns(
    group: Path, kind: str
) -> None:
    """The budget that is right for others ends it."""
    pytest.importorskip("uvicorn")
    environment = {key: os.environ[key] for key in os.environ if "LIFECYCLE" not in key}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        argv = [sys.executable, "-c", SERVER, str(group), kind]
        argv.append(str(listening.fileno()))
        passed = [listening.fileno()]
        with subprocess.Popen(argv, pass_fds=passed, env=environment) as server:
            port = listening.getsockname()[1]
            listening.close()
            try:
                with ThreadPoolExecutor(CLIENTS) as pool:
                    ports = [port] * CLIENTS
                    answers = [*pool.map(ask_again_and_again, ports, range(CLIENTS))]
                killed = server.poll() == -signal.SIGKILL
            finally:
                server.kill()
    statuses = [status for each in answers for status in each]
    if kind == "fixed":
        assert killed
        assert None in statuses
    else:
        assert not killed
        assert set(statuses) == {200}
        assert len(statuses) > CLIENTS
