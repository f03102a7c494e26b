"""The page that an engine writes, the lock in it, and the place where both meet."""

from __future__ import annotations

import os
import select
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle_zmq.process import locks, pages, proc
from lifecycle_zmq.process.pages import Page, Phase
from lifecycle_zmq.transport import endpoints, rendezvous
from lifecycle_zmq.transport.rendezvous import Rendezvous

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A fresh page's."""
    descriptor = pages.make_file()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def page(descriptor: int) -> Iterator[Page]:
    """The page, mapped as the API process does."""
    page = Page(descriptor)
    yield page
    page.close()


def readable(notice: int, seconds: float) -> bool:
    """Whether a descriptor becomes readable within a time."""
    return bool(select.select([notice], [], [], seconds)[0])


def test_phase_and_turns_cross_the_page(page: Page, descriptor: int) -> None:
    """What one side enters the other side sees; nothing was sent."""
    assert (page.phase, page.turns, page.lock_word) == (Phase.UNKNOWN, 0, None)
    other = Page.attach(os.dup(descriptor))
    assert other is not None
    other.enter(Phase.WORKING)
    other.enter(Phase.WAITING)
    assert (page.phase, page.turns) == (Phase.WAITING, 2)
    other.close()
    assert Page.attach(None) is None


def test_page_full_of_noise_is_read_as_unknown(page: Page) -> None:
    """An engine gone wrong can write anything: no phase, no lock (`S5`)."""
    page.memory[:64] = b"\xff" * 64
    assert (page.phase, page.lock_word) == (Phase.UNKNOWN, None)
    page.tell_lock_word(pages.LOCK_AT + 2)
    assert page.lock_word is None
    page.tell_lock_word(pages.LOCK_AT + pages.LOCK_SIZE)
    assert page.lock_word is None
    page.enter(Phase.LEFT)
    assert page.turns == 0  # it has counted over its end


def test_page_cannot_be_cut_short(descriptor: int) -> None:
    """It is sealed: no bus error in the process that reads it (`S5`, `fault-51`)."""
    for size in (0, 2 * pages.SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)


def test_page_is_made_without_memfd_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file without a name does the same where there is no memfd."""
    monkeypatch.delattr(os, "memfd_create")
    descriptor = pages.make_file()
    page = Page(descriptor)
    page.enter(Phase.WORKING)
    assert page.turns == 1
    page.close()
    os.close(descriptor)


class Holder:
    """A thread that holds the lock of a page until it is let go."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._leave = threading.Event()
        self._held = threading.Event()
        self.holds = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._held.wait(20)

    def _run(self) -> None:
        self.holds = locks.hold(self._page)
        self._held.set()
        self._leave.wait(20)

    def die(self) -> None:
        """End the thread, as the death of its process does."""
        self._leave.set()
        self._thread.join()


def test_end_of_the_holder_is_told(page: Page, descriptor: int) -> None:
    """Not before, and then at once; later comers are told, too."""
    assert locks.watch(page, descriptor) is None
    own = Page(descriptor)
    holder = Holder(own)
    assert holder.holds
    notices = [locks.watch(page, descriptor)]
    assert notices[0] is not None
    assert not readable(notices[0].notice, 0.05)
    holder.die()
    notices.append(locks.watch(page, descriptor))
    for notice in notices:
        assert notice is not None
        assert readable(notice.notice, 20)
        notice.close()
    del holder, own


def test_notice_that_is_closed_leaves_no_thread(page: Page, descriptor: int) -> None:
    """Also while the engine lives on; `no_leaks` counts them."""
    holder = Holder(page)
    before = threading.active_count()
    for _ in range(20):
        notice = locks.watch(page, descriptor)
        assert notice is not None
        notice.close()
    holder.die()
    for thread in threading.enumerate():
        if thread.name == "engine-death":
            thread.join(20)
    assert threading.active_count() <= before


def test_engine_that_scribbles_on_its_lock_keeps_nobody_busy(
    page: Page, descriptor: int
) -> None:
    """After so many wakes without a death the notice gives up (`S5`)."""
    holder = Holder(page)
    at = page.lock_word
    assert at is not None
    notice = locks.watch(page, descriptor)
    assert notice is not None
    word = notice._word
    number = 0
    while not readable(notice.notice, 0):
        number += 1
        page.memory[at : at + 4] = (1 + number % 2).to_bytes(4, "little")
        notice._call(word, locks._WAKE, 1)
        assert number < 10_000_000
    notice.close()
    holder.die()
    del word


@pytest.mark.parametrize("what", ["pipe", "start"])
def test_lock_is_not_watched_where_something_has_run_out(
    page: Page, descriptor: int, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Without descriptors or threads other notices have to do (`fault-50`)."""

    def refuse(*_: object) -> None:
        raise OSError if what == "pipe" else RuntimeError

    holder = Holder(page)
    with monkeypatch.context() as patch:
        place = locks.os if what == "pipe" else threading.Thread
        patch.setattr(place, what, refuse)
        assert locks.watch(page, descriptor) is None
    holder.die()


def test_lock_is_not_announced_where_it_cannot_be_held(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A C library without robust locks, or an unknown one: other notices have to do."""
    with monkeypatch.context() as patch:
        patch.setattr(locks.ctypes, "CDLL", lambda _: object())
        assert not locks.hold(page)
    with monkeypatch.context() as patch:
        patch.setattr(locks.threading, "get_native_id", lambda: 0x3FFF_FFF0)
        assert not locks.hold(page)
    assert page.lock_word is None


def test_process_that_is_not_there_is_taken_to_run() -> None:
    """Where there is no telling, nothing is held against an engine."""
    assert proc.look_at(2**22 + 1) == proc.ProcessState()
    assert proc.look_at(os.getpid()) == proc.ProcessState()


def test_endpoint_carries_the_descriptors() -> None:
    """One word on the command line tells all that the engine inherits."""
    descriptors = {"listener": 5, "liveness": 6}
    endpoint = endpoints.join("ipc:///tmp/x/engine", descriptors)
    assert endpoint == "ipc:///tmp/x/engine?listener=5&liveness=6"
    assert endpoints.split(endpoint) == ("ipc:///tmp/x/engine", descriptors)
    plain = "ipc:///tmp/x/engine"
    assert endpoints.split(endpoints.join(plain, {})) == (plain, {})


def test_socket_loses_its_name_once_somebody_has_connected(tmp_path: Path) -> None:
    """Nobody else finds it, and no kill later on can leave it (`S2`, `fault-56`)."""
    place = Rendezvous(tmp_path)
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.address.removeprefix("ipc://"))
        place.hide()
        assert list(tmp_path.iterdir()) == []
        place.close()


def test_socket_that_nobody_connects_to_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded and leaves nothing."""
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 0.01)
    place = Rendezvous(tmp_path)
    with pytest.raises(TimeoutError, match="no connection"):
        place.hide()
    place.close()
    assert list(tmp_path.iterdir()) == []


def test_sweep_takes_what_the_dead_have_left(tmp_path: Path) -> None:
    """Not what the living hold, and nothing that is not a socket of ours (`fault-56`)."""
    dead = tmp_path / "lifecycle-zmq-dead"
    dead.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead / "engine"))
    foreign = tmp_path / "lifecycle-zmq-foreign"
    foreign.mkdir()
    (foreign / "letter").touch()
    (tmp_path / "lifecycle-zmq-link").symlink_to(foreign)
    (tmp_path / "lifecycle-zmq-file").touch()
    living = Rendezvous(tmp_path)
    rendezvous.sweep(tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {living._directory.name}
    assert names == {f"lifecycle-zmq-{it}" for it in ("foreign", "link", "file")}
    assert (foreign / "letter").exists()
    assert living._directory.exists()
    living.close()
    rendezvous.sweep(tmp_path / "none")
    shutil.rmtree(foreign)
    for name in ("link", "file"):
        (tmp_path / f"lifecycle-zmq-{name}").unlink()


def test_directory_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers that start at the same moment do not take each other's place."""
    original, raced = rendezvous.tempfile.mkdtemp, []

    def mkdtemp(**options: object) -> str:
        made = original(**options)
        if not raced:
            raced.append(made)
            rendezvous.sweep(tmp_path)
        return made

    monkeypatch.setattr(rendezvous.tempfile, "mkdtemp", mkdtemp)
    place = Rendezvous(tmp_path)
    assert raced
    assert raced[0] != str(place._directory)
    assert place._directory.exists()
    place.close()
