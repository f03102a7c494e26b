"""Engine processes: spawn, output, exit reasons, the OOM killer, and the heartbeat."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from lifecycle_zmq import ZmqEngine, heartbeat, process as process_module
from lifecycle_zmq.heartbeat import HeartbeatPage, Phase, StallDetector, StallLimits
from lifecycle_zmq.process import EngineProcess, ProcessState

pytestmark = pytest.mark.usefixtures("no_leaks")

NOBODY = 65534


@pytest.fixture
def gone(watched: Any) -> Any:
    """Wait until a process has ended."""

    async def wait(pid: int) -> None:
        with watched(pid) as descriptor, anyio.fail_after(20):
            await anyio.wait_readable(descriptor)

    return wait


async def _exists(path: Path) -> None:
    with anyio.fail_after(20):
        while not path.exists():
            await anyio.sleep(0.002)


@pytest.mark.anyio
async def test_engine_leaves_when_its_pipe_closes(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, gone: Any
) -> None:
    """End of file on standard input ends it, idle in its poll or not (`fault-33`)."""
    socket = tmp_path / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{socket}", "--incarnation", "1"]
    with subprocess.Popen(  # noqa: ASYNC220
        argv, env=environment, stdin=subprocess.PIPE
    ) as engine:
        assert engine.stdin is not None
        await _exists(socket)
        assert engine.poll() is None
        engine.stdin.close()
        await gone(engine.pid)
        assert engine.wait(20) == 70


@pytest.mark.anyio
async def test_engine_leaves_with_its_parent_although_the_pipe_is_open(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, gone: Any
) -> None:
    """The kernel kills it too, even if the pipe is still open (`fault-31`)."""
    socket = tmp_path / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{socket}", "--incarnation", "1"]
    spawn = (
        "import subprocess, sys;"
        "print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    )
    read, write = os.pipe()
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", spawn, *argv],
        env=environment,
        stdin=read,
        stdout=subprocess.PIPE,
    ) as parent:
        os.close(read)
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        await _exists(socket)
        parent.kill()
        await gone(pid)
    os.close(write)


@pytest.mark.anyio
@pytest.mark.parametrize("descriptors", [True, False], ids=["pidfd", "thread"])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("import sys; sys.exit(3)", "exit"),
        ("pass", "exit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "segfault"),
        ("import os; os.abort()", "aborted"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", "signal"),
        ("import os; os.kill(os.getpid(), 40)", "signal"),
    ],
)
async def test_reason_tells_how_a_process_ended(
    monkeypatch: pytest.MonkeyPatch, descriptors: bool, end: str, reason: str
) -> None:
    """One word for each way to go, with and without process descriptors."""
    if not descriptors:
        monkeypatch.setattr(process_module, "open_pidfd", lambda _: None)
    process = EngineProcess([sys.executable, "-S", "-c", end])
    with anyio.fail_after(20):
        await process.wait()
        await process.wait()
        assert process.reap() == reason
        assert await process.close() == reason
    process.kill()  # its number may be reused by now: nothing is sent


@pytest.mark.anyio
async def test_reason_is_oom_when_the_kernel_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL with a counted OOM kill of our cgroup is reported as such."""
    kills = iter([4, 5])
    monkeypatch.setattr(process_module, "_count_oom_kills", lambda: next(kills))
    process = EngineProcess([sys.executable, "-S", "-c", "input()"])
    assert await process.close() == "oom"


@pytest.mark.anyio
async def test_close_ends_the_whole_session_of_the_engine(watched: Any) -> None:
    """What the engine has spawned in its session goes with it."""
    spawn = (
        "import subprocess, sys, os;"
        "argv = [sys.executable, '-S', '-c', 'import time; time.sleep(600)'];"
        "child = subprocess.Popen(argv);"
        "os.write(1, b'%d\\n' % child.pid); input()"
    )
    process = EngineProcess([sys.executable, "-S", "-c", spawn])
    with anyio.fail_after(20):
        while "\n" not in process.output:
            process.read_output()
            await anyio.sleep(0.002)
    with watched(int(process.output)) as child:
        assert await process.close() == "killed"
        with anyio.fail_after(20):
            await anyio.wait_readable(child)


@pytest.mark.anyio
async def test_output_without_end_is_read_in_bounded_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that writes faster than it is read does not hold the loop up."""
    process = EngineProcess([sys.executable, "-S", "-c", "input()"])
    reads: list[int] = []

    def endless(_descriptor: int, size: int) -> bytes:
        reads.append(size)
        assert len(reads) < 1000
        return b"x" * size

    with monkeypatch.context() as patch:
        patch.setattr(process_module.os, "read", endless)
        assert process.read_output()
        assert process.output == "x" * 2**16
    await process.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_close_is_finished_when_its_task_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A native cancel gets through any shield; the descriptors are closed all the same."""
    process = EngineProcess([sys.executable, "-S", "-c", "input()"])
    monkeypatch.setattr(process, "wait", anyio.sleep_forever)
    closing = asyncio.create_task(process.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    process.reap()


@contextmanager
def _listening(argv: list[str], environment: dict[str, str]) -> Iterator[Any]:
    with subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE) as engine:
        yield engine
        engine.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_other_users_cannot_reach_the_socket(
    engine_argv: list[str], environment: dict[str, str]
) -> None:
    """Neither the directory nor the socket lets another uid in (`S2`, `N11`)."""
    python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no interpreter that another user may run")
    connect = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(20)\n"
        "try: s.connect(sys.argv[1]); print(len(s.recv(64)))\n"
        "except PermissionError: print('denied')\n"
        "except ConnectionError: print(0)\n"
    )
    directory = Path("/tmp") / f"lifecycle-test-{os.getpid()}"
    directory.mkdir(mode=0o700)
    socket = directory / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{socket}", "--incarnation", "1"]

    def attempt(**user: Any) -> str:
        done = subprocess.run(
            [python, "-S", "-c", connect, str(socket)],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
            **user,
        )
        return done.stdout.strip()

    try:
        with _listening(argv, environment):
            deadline = time.monotonic() + 20
            while not socket.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            assert attempt(user=NOBODY) == "denied"
            directory.chmod(0o755)
            socket.chmod(0o777)
            assert attempt(user=NOBODY) == "0"
            assert int(attempt()) > 0
    finally:
        shutil.rmtree(directory)


SCRIPT = Path(__file__).with_name("scripted_oom.py")
LIMIT = 256 * 2**20
ROOT = Path("/sys/fs/cgroup")


def _places() -> Iterator[tuple[Path, str]]:
    """Where a group may be made, and what its limit is called."""
    groups = Path("/proc/self/cgroup").read_text()
    for pattern, root, limit in (
        (r"^\d+:memory:/(\S*)", ROOT / "memory", "memory.limit_in_bytes"),
        (r"^0::/(\S*)", ROOT, "memory.max"),
    ):
        found = re.search(pattern, groups, re.MULTILINE)
        if found is not None:
            yield root / found[1], limit
        yield root, limit


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of 256 MiB, where we may make one."""
    for place, limit in _places():
        group = place / f"lifecycle-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT))
        except OSError:
            group.rmdir()
            continue
        yield group
        _remove(group)
        return
    pytest.skip("no right to make a cgroup with a limit of memory")


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 20
    while True:  # the last process may not be gone yet
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def test_engine_that_uses_all_memory_is_lost_as_oom(
    small_group: Path, engine_argv: list[str], environment: dict[str, str]
) -> None:
    """The kernel takes the engine, not the server; the next one serves (`fault-25`, `S6`)."""
    argv = [sys.executable, str(SCRIPT), str(small_group / "cgroup.procs")]
    done = subprocess.run(
        [*argv, *engine_argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["oom"] * 9, 2]


@pytest.mark.parametrize(
    ("groups", "file", "kills"),
    [
        ("0::/unit\n", "unit/memory.events", 2),
        ("0::/\n", "memory.events", 2),
        ("0::/caf\udce9\n", "caf\udce9/memory.events", 2),  # names are any bytes
        ("3:cpu,cpuacct:/x\n2:memory:/old\n0::/\n", "memory/old/memory.oom_control", 2),
        ("1:cpu:/unit\n", "unit/memory.events", 0),
        ("0::/gone\n", "unit/memory.events", 0),
    ],
)
def test_oom_kills_are_read_from_the_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, file: str, kills: int
) -> None:
    """The counter of our own cgroup, of either version; without one it is 0 (`fault-25`)."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("oom 3\noom_kill_disable 0\noom_kill 2\n")
    (tmp_path / "groups").write_text(groups, "utf-8", "surrogateescape")
    places = {"/proc/self/cgroup": tmp_path / "groups", "/sys/fs/cgroup": tmp_path}

    def place(first: str, *rest: str) -> Path:
        return Path(places[first], *rest)

    monkeypatch.setattr(process_module, "Path", place)
    assert process_module._count_oom_kills() == kills


@pytest.mark.anyio
async def test_engine_goes_with_the_thread_that_spawned_it(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """Its parent lives on: that is why no thread of a pool may spawn it (`fault-32`)."""
    place = tmp_path / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{place}", "--incarnation", "1"]
    enough = threading.Event()
    made: list[EngineProcess] = []

    def spawn() -> None:
        made.append(EngineProcess(argv, env=environment))
        enough.wait(20)

    thread = threading.Thread(target=spawn)
    thread.start()
    with anyio.fail_after(20):
        while not place.exists():
            await anyio.sleep(0.002)
        (engine,) = made
        assert not engine.state().exiting
        enough.set()
        thread.join()
        await engine.wait()
    assert await engine.close() == "killed"


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A fresh page's."""
    descriptor = heartbeat.create_page_file()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def page(descriptor: int) -> Iterator[HeartbeatPage]:
    """The page, mapped as the API process does."""
    page = HeartbeatPage(descriptor)
    yield page
    page.close()


def readable(notice: int, seconds: float) -> bool:
    """Whether a descriptor becomes readable within a time."""
    return bool(select.select([notice], [], [], seconds)[0])


def test_phase_and_turns_cross_the_page(page: HeartbeatPage, descriptor: int) -> None:
    """What one side enters the other side sees; nothing was sent."""
    assert (page.phase, page.beats, page.lock_word) == (Phase.UNKNOWN, 0, None)
    other = HeartbeatPage.attach(os.dup(descriptor))
    assert other is not None
    other.enter(Phase.WORKING)
    other.enter(Phase.WAITING)
    assert (page.phase, page.beats) == (Phase.WAITING, 2)
    other.close()
    assert HeartbeatPage.attach(None) is None


def test_page_full_of_noise_is_read_as_unknown(page: HeartbeatPage) -> None:
    """An engine gone wrong can write anything: no phase, no lock (`S5`)."""
    page.memory[:64] = b"\xff" * 64
    assert (page.phase, page.lock_word) == (Phase.UNKNOWN, None)
    page.publish_lock_word(heartbeat.LOCK_AT + 2)
    assert page.lock_word is None
    page.publish_lock_word(heartbeat.LOCK_AT + heartbeat.LOCK_SIZE)
    assert page.lock_word is None
    page.enter(Phase.EXITED)
    assert page.beats == 0  # it has counted over its end


def test_page_cannot_be_cut_short(descriptor: int) -> None:
    """It is sealed: no bus error in the process that reads it (`S5`, `fault-51`)."""
    for size in (0, 2 * heartbeat.SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)


def test_page_is_made_without_memfd_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """POSIX shared memory does the same where there is no memfd."""
    monkeypatch.delattr(os, "memfd_create")
    descriptor = heartbeat.create_page_file()
    page = HeartbeatPage(descriptor)
    page.enter(Phase.WORKING)
    assert page.beats == 1
    page.close()
    os.close(descriptor)


class Holder:
    """A thread that holds the lock of a page until it is let go."""

    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self._leave = threading.Event()
        self._held = threading.Event()
        self.holds = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._held.wait(20)

    def _run(self) -> None:
        self.holds = heartbeat.acquire_death_lock(self._page)
        self._held.set()
        self._leave.wait(20)

    def die(self) -> None:
        """End the thread, as the death of its process does."""
        self._leave.set()
        self._thread.join()


def test_end_of_the_holder_is_noticed(page: HeartbeatPage, descriptor: int) -> None:
    """Not before, and then at once; also to later watchers."""
    assert heartbeat.watch_exit(page, descriptor) is None
    own = HeartbeatPage(descriptor)
    holder = Holder(own)
    assert holder.holds
    watchers = [heartbeat.watch_exit(page, descriptor)]
    assert watchers[0] is not None
    assert not readable(watchers[0].pipe, 0.05)
    holder.die()
    watchers.append(heartbeat.watch_exit(page, descriptor))
    for watcher in watchers:
        assert watcher is not None
        assert readable(watcher.pipe, 20)
        watcher.close()
    del holder, own


def test_watcher_that_is_closed_leaves_no_thread(
    page: HeartbeatPage, descriptor: int
) -> None:
    """Also while the engine lives on; `no_leaks` counts them."""
    holder = Holder(page)
    before = threading.active_count()
    for _ in range(20):
        watcher = heartbeat.watch_exit(page, descriptor)
        assert watcher is not None
        watcher.close()
    holder.die()
    for thread in threading.enumerate():
        if thread.name == "engine-exit":
            thread.join(20)
    assert threading.active_count() <= before


def test_watcher_that_is_closed_before_it_sleeps_ends(
    page: HeartbeatPage, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake that comes just before the thread sleeps is not its last chance."""
    real = heartbeat.ExitWatcher._call
    looked, closed = threading.Event(), threading.Event()

    def late(self: Any, word: Any, operation: int, value: int) -> Any:
        if operation == heartbeat._WAIT:
            looked.set()
            assert closed.wait(20)
        return real(self, word, operation, value)

    monkeypatch.setattr(heartbeat.ExitWatcher, "_call", late)
    holder = Holder(page)
    watcher = heartbeat.watch_exit(page, descriptor)
    assert watcher is not None
    assert looked.wait(20)
    watcher.close()
    closed.set()
    for thread in threading.enumerate():
        if thread.name == "engine-exit":
            thread.join(20)
            assert not thread.is_alive()
    holder.die()


def test_engine_that_overwrites_its_lock_keeps_no_thread_busy(
    page: HeartbeatPage, descriptor: int
) -> None:
    """After so many wakes without a death the watcher gives up (`S5`)."""
    holder = Holder(page)
    at = page.lock_word
    assert at is not None
    watcher = heartbeat.watch_exit(page, descriptor)
    assert watcher is not None
    word = watcher._word
    number = 0
    while not readable(watcher.pipe, 0):
        number += 1
        page.memory[at : at + 4] = (1 + number % 2).to_bytes(4, "little")
        watcher._call(word, heartbeat._WAKE, 1)
        assert number < 10_000_000
    watcher.close()
    holder.die()
    del word


@pytest.mark.parametrize("what", ["pipe", "start"])
def test_lock_is_not_watched_where_something_has_run_out(
    page: HeartbeatPage, descriptor: int, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Without descriptors or threads other notices have to do (`fault-50`)."""

    def refuse(*_: object) -> None:
        raise OSError if what == "pipe" else RuntimeError

    holder = Holder(page)
    with monkeypatch.context() as patch:
        place = heartbeat.os if what == "pipe" else threading.Thread
        patch.setattr(place, what, refuse)
        assert heartbeat.watch_exit(page, descriptor) is None
    holder.die()


def test_lock_is_not_announced_where_it_cannot_be_held(
    page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A C library without robust locks, or an unknown one: other notices have to do."""
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat.ctypes, "CDLL", lambda _: object())
        assert not heartbeat.acquire_death_lock(page)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat.threading, "get_native_id", lambda: 0x3FFF_FFF0)
        assert not heartbeat.acquire_death_lock(page)
    assert page.lock_word is None


TWO_ENGINES = """
import gc
from lifecycle_zmq.heartbeat import HeartbeatPage, PageHeartbeat, create_page_file

one, two = (HeartbeatPage.attach(create_page_file()) for _ in range(2))
PageHeartbeat(one).stop()
del one
gc.collect()
PageHeartbeat(two).stop()
"""


def test_thread_that_has_served_may_hold_another_lock() -> None:
    """The C library writes to the lock before it, which ended the process."""
    subprocess.run([sys.executable, "-c", TWO_ENGINES], check=True, timeout=120)


def test_process_that_is_not_there_is_taken_to_run() -> None:
    """Where there is no telling, nothing is held against an engine."""
    assert process_module.read_process_state(2**22 + 1) == process_module.ProcessState()
    assert (
        process_module.read_process_state(os.getpid()) == process_module.ProcessState()
    )


RUNS = ProcessState()
STOPPED = ProcessState(stopped=True)
Look = tuple[ProcessState, Phase, int]


def detector_of() -> StallDetector:
    """Bounds as by default."""
    return StallDetector(StallLimits(busy=1.0, stalled=30.0, stopped=2.0))


def verdict_of(
    detector: StallDetector,
    looks: Iterable[Look],
    *,
    every: float = 0.05,
    start: float = 0.0,
) -> tuple[float, str] | None:
    """The time of the first verdict, and which."""
    for number, sample in enumerate(looks):
        now = start + number * every
        verdict = detector.sample(now, *sample)
        if verdict is not None:
            return now, verdict
    return None


def test_step_that_takes_five_seconds_is_busy_and_nothing_else() -> None:
    """A hold of the interpreter lock, or a long prefill, is no death (`fault-34`)."""
    detector = detector_of()
    assert verdict_of(detector, [(RUNS, Phase.WORKING, 7)] * 100) is None
    assert detector.busy
    assert detector.sample(5.0, RUNS, Phase.WORKING, 8) is None
    assert not detector.busy


def test_step_that_takes_too_long_is_stalled() -> None:
    """A call that never returns is a stall at its limit (`fault-37`, `peers-76`)."""
    verdict = verdict_of(detector_of(), [(RUNS, Phase.WORKING, 7)] * 1000)
    assert verdict == (pytest.approx(30.0, abs=0.2), "stalled")


def test_long_prefills_in_a_row_are_never_stalled() -> None:
    """Turns count, not tokens: each step of 20 s is a sign of life (`peers-77`)."""
    looks = [(RUNS, Phase.WORKING, number // 400) for number in range(4000)]
    assert verdict_of(detector_of(), looks) is None


def test_engine_that_sleeps_until_a_message_comes_is_well() -> None:
    """Not a single turn in an hour without work is what is wanted."""
    detector = detector_of()
    assert verdict_of(detector, [(RUNS, Phase.WAITING, 7)] * 72_000) is None
    assert not detector.busy and not detector.suspicious


@pytest.mark.parametrize(
    "sample",
    [(STOPPED, Phase.WAITING, 7), (RUNS, Phase.WORKING, 7), (RUNS, Phase.EXITED, 7)],
)
def test_engine_is_suspicious_from_the_first_silent_sample(sample: Look) -> None:
    """Stopped, in a step or gone from its loop; until it shows that it goes on."""
    detector = detector_of()
    assert (detector.stopped_now, detector.suspicious) == (False, False)
    detector.sample(0.0, RUNS, Phase.WORKING, 7)
    assert not detector.suspicious
    detector.sample(0.05, *sample)
    assert detector.suspicious
    assert detector.stopped_now is (sample[0] is STOPPED)
    detector.sample(0.1, RUNS, Phase.WORKING, 8)
    assert (detector.stopped_now, detector.suspicious) == (False, False)


def test_stopped_process_is_noticed_at_the_second_sample_and_lost_at_its_limit() -> (
    None
):
    """Whatever it was doing when the signal came (`fault-23`, `N6`)."""
    for phase in Phase:
        detector = detector_of()
        detector.sample(0.0, RUNS, phase, 1)
        assert verdict_of(detector, [(STOPPED, phase, 1)] * 2, start=0.05) is None
        assert detector.stopped
        if phase is not Phase.EXITED:
            verdict = verdict_of(detector, [(STOPPED, phase, 1)] * 100, start=0.15)
            assert verdict == (pytest.approx(2.05, abs=0.1), "stopped")


def test_process_that_is_continued_in_time_loses_nothing() -> None:
    """Each stop is measured alone."""
    detector = detector_of()
    looks = ([(STOPPED, Phase.WAITING, 1)] * 30 + [(RUNS, Phase.WAITING, 1)]) * 10
    assert verdict_of(detector, looks) is None
    assert not detector.stopped


def test_pause_of_our_own_loop_is_not_held_against_the_engine() -> None:
    """Blocked for minutes, or the machine asleep: one gap counts little (`fault-58`, `fault-59`)."""
    detector = detector_of()
    for now in (0.0, 600.0, 1200.0):
        assert detector.sample(now, STOPPED, Phase.WORKING, 7) is None
    assert not detector.busy or detector.sample(1200.1, RUNS, Phase.WORKING, 8) is None


def test_loses_an_engine_that_lives_without_its_loop() -> None:
    """Its socket is closed: no request is answered, though the process exists."""
    verdict = verdict_of(detector_of(), [(RUNS, Phase.EXITED, 9)] * 100)
    assert verdict == (pytest.approx(1.0, abs=0.1), "disconnected")


def test_page_without_a_writer_is_no_reason() -> None:
    """An engine that does not show its turns is watched by its end alone."""
    assert verdict_of(detector_of(), [(RUNS, Phase.UNKNOWN, 0)] * 2000) is None


def test_samples_in_quick_succession_prove_nothing() -> None:
    """Two samples within a millisecond count as one: no request is refused."""
    detector: Any = detector_of()
    detector.sample(0.0, STOPPED, Phase.WAITING, 1)
    detector.sample(0.001, STOPPED, Phase.WAITING, 1)
    assert not detector.stopped


MakeEngine = Callable[..., ZmqEngine]


@pytest.mark.anyio
async def test_death_is_reported_without_the_lock(
    make_engine: MakeEngine, waiters_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel's notice is not to be had, the end of the process tells."""
    monkeypatch.setattr(heartbeat, "_FUTEX", None)
    async with make_engine() as engine:
        with anyio.fail_after(20):
            await engine.wait_ready()
            waiters = waiters_of(engine)
            await waiters.start(8, {"forever": True})
            os.kill(engine.pid or 0, signal.SIGKILL)
            await waiters.all_failed(8)
    assert waiters.reasons == {"killed": 8}


@pytest.mark.anyio
@pytest.mark.parametrize("there", [True, False], ids=["proc", "no-proc"])
async def test_stop_of_an_idle_engine_is_found(
    make_engine: MakeEngine,
    becomes: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    there: bool,
) -> None:
    """It is replaced even without pending requests, also without /proc (`peers-76`)."""
    if not there:
        monkeypatch.setattr(process_module, "_read", _no_proc)
    with anyio.fail_after(120):
        async with make_engine(stopped_after=600.0) as engine:
            await engine.wait_ready()
            os.kill(engine.pid or 0, signal.SIGSTOP)
            await eventually(lambda: engine.health == "stopped")
            os.kill(engine.pid or 0, signal.SIGCONT)
            await eventually(lambda: engine.health == "serving")
            assert engine.incarnation == 1
        async with make_engine(stopped_after=0.5) as engine:
            await engine.wait_ready()
            os.kill(engine.pid or 0, signal.SIGSTOP)
            await becomes(engine, lambda: engine.incarnation == 2)
            await engine.wait_ready()


def _no_proc(_path: str) -> bytes:
    raise FileNotFoundError
