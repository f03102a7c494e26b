"""What workers share: rows, the lock of a life, and epochs; real files, real kills."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from descriptors import descriptors_before, open_descriptors

from lifecycle.shared import rows
from lifecycle.shared.rows import BYTES, EPOCH, IDENT, SLOTS, Capacity, Folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="OFD locks")

WORKER = """
import sys
from lifecycle.shared.rows import Folder
folder = Folder(sys.argv[1])
row = folder.join()
row.add(3, 400)
def say(*what):
    print(*what, flush=True)
say("joined")
for line in sys.stdin:
    if line == "fork\\n":
        import os
        closed, closing = os.pipe()
        pid = os.fork()
        if pid == 0:
            row.close()  # as the hook of a gate does
            os.write(closing, b"!")
            sys.stdin.read()  # until the test ends it
            os._exit(0)
        os.read(closed, 1)
        say(pid)
    else:
        say(int(folder.elect(row, int(line))))
"""


class Worker:
    """A process with a row."""

    def __init__(self, path):
        argv = [sys.executable, "-c", WORKER, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(argv, text=True, **pipes)
        assert self.process.stdout.readline() == "joined\n"

    def ask(self, what):
        self.send(what)
        return int(self.process.stdout.readline())

    def send(self, what):
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def worker(tmp_path):
    made = []

    def make():
        made.append(Worker(tmp_path / "gate"))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.wait(60)
        each.process.stdin.close()
        each.process.stdout.close()


@pytest.fixture
def folder(tmp_path):
    made = Folder(str(tmp_path / "gate"))
    yield made
    made.close()


def test_says_what_a_worker_holds_after_its_death(folder, worker) -> None:
    """A row outlives its worker, and says that it is dead."""
    one = worker()
    (row,) = folder.rows()
    assert row.alive and (row.words[SLOTS], row.words[BYTES]) == (3, 400)
    one.kill()
    assert not row.alive and (row.words[SLOTS], row.words[BYTES]) == (3, 400)
    assert folder.live_rows() == []
    folder.remove(row)
    assert folder.rows() == []
    row.close()


def test_lives_while_it_is_stopped(folder, worker) -> None:
    """A stopped worker is alive: nobody may take what it holds."""
    one = worker()
    os.kill(one.process.pid, signal.SIGSTOP)
    (row,) = folder.live_rows()
    assert row.words[SLOTS] == 3


def test_dies_though_its_child_lives(folder, worker) -> None:
    """A forked child keeps the mapping, and not the lock: two open files."""
    one = worker()
    child = one.ask("fork")
    (row,) = folder.rows()
    try:
        assert row.alive  # the child closed its copy of the lock, and dropped no lock
        one.process.kill()  # its input stays open: the child ends with that
        one.process.wait(60)
        os.kill(child, 0)
        assert not row.alive
    finally:
        os.kill(child, signal.SIGKILL)
        row.close()


def test_elects_one_of_many(folder, worker) -> None:
    """Of all that would lead an epoch, exactly one does, and its row is the link's."""
    rivals = [worker() for _ in range(3)]
    for epoch in range(1, 20):
        for each in rivals:
            each.send(epoch)
        won = [int(each.process.stdout.readline()) for each in rivals]
        assert sum(won) == 1
        row = folder.leader(epoch)
        assert row.alive
        row.close()
    assert folder.newest_epoch() == 19
    assert folder.has_epoch(7) and not folder.has_epoch(20)
    folder.forget_epochs(18)
    assert not folder.has_epoch(18) and folder.has_epoch(19)
    with pytest.raises(FileNotFoundError):
        folder.leader(18)


def test_leads_no_longer_than_it_lives(folder, worker) -> None:
    """The link to the row of a leader that was killed says that it is dead."""
    one = worker()
    assert one.ask(1) == 1
    row = folder.leader(1)
    assert row.alive
    one.kill()
    assert not row.alive
    row.close()


def test_knows_nobody_in_a_new_folder(folder) -> None:
    """A gate that nobody ever led has epoch 0 and no rows."""
    assert folder.newest_epoch() == 0 and folder.rows() == []


def test_sees_no_row_before_its_lock(folder, monkeypatch) -> None:
    """A row gets its name once it is locked: a cleaner would take it for dead."""
    lock, seen = rows.fcntl.fcntl, []

    def look_and_lock(*args):
        seen.append(folder._names("row."))
        return lock(*args)

    monkeypatch.setattr(rows.fcntl, "fcntl", look_and_lock)
    row = folder.join()
    assert seen == [[]] and len(folder._names("row.")) == 1
    row.close()


def test_asks_for_a_lock_without_taking_it(folder) -> None:
    """To look whether a worker lives makes nobody else believe that it does."""
    row = folder.join()
    row.close()
    first, second = (folder.row(row.words[IDENT]) for _ in range(2))
    assert not first.alive and not second.alive
    first.close()
    second.close()


def test_finds_a_row_by_its_name(folder) -> None:
    """A row is found by its ident until it is removed, with the sockets beside it."""
    row = folder.join()
    ident = row.words[IDENT]
    other = folder.row(ident)
    other.close()
    assert other.words[EPOCH] == 0
    Path(folder.socket_path(ident, 3)).touch()
    Path(folder.socket_path(ident, 4)).touch()
    folder.remove_socket(ident, 3)
    folder.remove_socket(ident, 3)
    assert [each.name for each in Path(folder.path).glob("sock.*")] == [
        f"sock.{ident:x}.4"
    ]
    folder.remove(row)
    assert list(Path(folder.path).iterdir()) == []
    with pytest.raises(FileNotFoundError):
        folder.row(ident)
    row.close()
    row.close()


def test_is_found_again_if_its_remover_dies(folder, monkeypatch) -> None:
    """Who dies while it removes a dead worker leaves the row, by which others go on."""
    row = folder.join()
    sock = Path(folder.socket_path(row.words[IDENT], 1))
    sock.touch()
    removed = []
    monkeypatch.setattr(os, "unlink", lambda name, **_: removed.append(name))
    folder.remove(row)
    assert removed == [sock.name, f"row.{row.words[IDENT]:x}"]
    row.close()


def test_lists_all_names_in_two_threads(folder) -> None:
    """Two that list the folder at once both see everything: no offset is shared."""
    rows = [folder.join() for _ in range(100)]
    seen = []

    def look():
        seen.extend(len(folder._names("row.")) for _ in range(50))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert set(seen) == {100} and len(seen) == 200
    for row in rows:
        row.close()


def test_skips_what_vanishes_while_it_looks(folder, monkeypatch) -> None:
    """A row that is removed between the list and the look is nobody's."""
    monkeypatch.setattr(folder, "_names", lambda prefix: ["row.1"])
    assert folder.rows() == []


def test_lets_one_of_two_lead(folder) -> None:
    """A second link of one epoch is refused."""
    one, two = folder.join(), folder.join()
    assert folder.elect(one, 1)
    assert not folder.elect(two, 1) and folder.elect(two, 2)
    leader = folder.leader(2)
    assert leader.words[IDENT] == two.words[IDENT]
    folder.forget_epochs(1)
    assert not folder.has_epoch(1) and folder.newest_epoch() == 2
    for row in (one, two, leader):
        row.close()


def test_says_which_capacity_a_worker_knows(folder) -> None:
    """A capacity is read whole or not at all."""
    row = folder.join()
    assert row.capacity is None
    row.write_capacity(Capacity(7, None, 0))
    assert row.capacity == Capacity(7, None, 0)
    row.words[12] = 0  # stopped half-way
    assert row.capacity is None
    row.close()


def test_says_that_its_folder_cannot_be_made(tmp_path: Path) -> None:
    """With its name and a remedy; the type is that of the system's own error."""
    Path(tmp_path, "file").touch()
    with pytest.raises(NotADirectoryError, match="name one where.*file/gate"):
        Folder(str(tmp_path / "file" / "gate"))


def test_refuses_a_folder_that_others_may_enter(tmp_path) -> None:
    """The folder is of this user alone: its mode and its owner are checked."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="mode 755; .*chmod 700"):
        Folder(str(open_to_all))
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(OSError, match=r"symbolic|directory"):
        Folder(str(tmp_path / "link"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_refuses_a_folder_of_another_user(tmp_path) -> None:
    """A folder of another user is not used, whatever its mode."""
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, -1)
    with pytest.raises(PermissionError, match="user 12345"):
        Folder(str(foreign))


def test_notices_that_its_folder_was_replaced(folder) -> None:
    """A folder that is removed, or another of the same name, is not this one."""
    assert folder.in_place
    Path(folder.path).rename(folder.path + ".old")
    assert not folder.in_place
    Path(folder.path).mkdir()
    assert not folder.in_place


def test_leaves_no_descriptor_where_a_row_cannot_be_made(folder, monkeypatch) -> None:
    """What was opened for a row is closed when the rest fails."""
    before = descriptors_before()
    Path(folder.path, "row.5").touch()  # too short to be mapped
    with pytest.raises(ValueError, match="mmap"):
        folder.row(5)
    assert open_descriptors() == before
    folder.close()
    folder.close()


def test_live_rows_are_those_of_now(tmp_path: Path) -> None:
    """Rows that come and go between two looks are seen, in whatever time they do."""
    mine, theirs = Folder(str(tmp_path / "gate")), Folder(str(tmp_path / "gate"))
    try:
        for _ in range(50):
            assert mine.live_rows() == []
            row = theirs.join()
            (found,) = mine.live_rows()
            assert found.words[IDENT] == row.words[IDENT]
            row.close()
            assert mine.live_rows() == []
            theirs.remove(row)
    finally:
        mine.close()
        theirs.close()


def test_looks_for_rows_again_only_where_the_folder_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics that nothing changes open no files."""
    folder = Folder(str(tmp_path / "gate"))
    row = folder.join()
    os.utime(tmp_path / "gate", ns=(1, 1))
    looks: list[int] = []
    names = folder._names
    monkeypatch.setattr(folder, "_names", lambda it: looks.append(1) or names(it))
    assert [len(folder.live_rows()) for _ in range(3)] == [1, 1, 1]
    assert len(looks) == 1
    other = folder.join()
    assert len(folder.live_rows()) == 2
    assert len(looks) == 2
    for each in (row, other):
        each.close()
    folder.close()


def test_removes_what_the_dead_left_unnamed(folder) -> None:
    """A row without a name is removed with its worker, and not before."""
    path = Path(folder.path)
    left = path / "new.1"
    left.touch()
    born = rows.Row(folder.descriptor, "new.2", make=rows.lock_for_life)
    folder.remove_unborn()
    assert [each.name for each in path.iterdir()] == ["new.2"]
    born.close()
    folder.remove_unborn()
    assert list(path.iterdir()) == []


def test_makes_another_row_where_one_was_taken_for_dead(folder, monkeypatch) -> None:
    """A worker whose row was removed before it had a lock or a name makes another."""
    rename, lock, tries = folder._rename, rows.fcntl.fcntl, []

    def remove_then_rename(hidden, name):
        tries.append(hidden)
        if len(tries) == 1:
            folder._unlink(hidden)
        rename(hidden, name)

    def remove_then_lock(*args):
        locked.append(args)
        if len(locked) == 1:
            (name,) = folder._names("new.")
            folder._unlink(name)
        return lock(*args)

    locked: list[object] = []
    monkeypatch.setattr(folder, "_rename", remove_then_rename)
    row = folder.join()
    assert len(tries) == 2 and len(folder.live_rows()) == 1
    monkeypatch.setattr(rows.fcntl, "fcntl", remove_then_lock)
    other = folder.join()
    assert len(tries) == 3 and len(folder.live_rows()) == 2
    for each in (row, other):
        each.close()


def test_leaves_nothing_where_it_cannot_join(folder, monkeypatch) -> None:
    """A row that cannot be written or named is removed, with its descriptors."""
    before = descriptors_before()

    def fail(*args):
        raise OSError(28, "No space left on device")

    for where, name in ((rows.os, "pwrite"), (folder, "_rename")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail)
            with pytest.raises(OSError, match="No space"):
                folder.join()
        assert list(Path(folder.path).iterdir()) == []
        assert open_descriptors() == before
    Path(folder.path).rename(folder.path + ".old")
    Path(folder.path + ".old").rmdir()
    with pytest.raises(FileNotFoundError):
        folder.join()


def test_has_room_for_each_word_of_a_row(folder) -> None:
    """A row is written, not only made long: a store into a hole may kill a process."""
    row = rows.Row(folder.descriptor, "new.1", make=rows.lock_for_life)
    (path,) = Path(folder.path).iterdir()
    with path.open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == path.stat().st_size
    row.close()


def test_is_in_place_where_nobody_can_tell(folder, monkeypatch) -> None:
    """An error that says nothing of the folder does not say that it is gone."""
    row = folder.join()

    def fail(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "lstat", fail)
    assert folder.in_place
    monkeypatch.setattr(os, "lstat", fail)
    assert not folder.lost(row)
    row.close()


def test_reads_the_rows_it_knows_without_descriptors(folder, monkeypatch) -> None:
    """What cannot be opened now is read later; what is open is read as it is."""
    one = folder.join()
    assert len(folder.live_rows()) == 1
    two = folder.join()

    def fail(*args):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "Row", fail)
        assert [row.words[IDENT] for row in folder.live_rows()] == [one.words[IDENT]]
        with pytest.raises(OSError, match="Too many"):
            folder.rows()
    assert len(folder.live_rows()) == 2
    for each in (one, two):
        each.close()


def test_closes_what_it_opened_where_another_row_cannot_be(folder, monkeypatch) -> None:
    """Rows that were opened before the descriptors ran out are closed again."""
    made = [folder.join() for _ in range(3)]
    before, real, opened = descriptors_before(), rows.Row, []

    def third_fails(*args):
        opened.append(args)
        if len(opened) == 3:
            raise OSError(24, "Too many open files")
        return real(*args)

    monkeypatch.setattr(rows, "Row", third_fails)
    with pytest.raises(OSError, match="Too many"):
        folder.rows()
    assert open_descriptors() == before
    for each in made:
        each.close()


def test_skips_a_row_that_a_crash_of_the_host_cut_short(folder) -> None:
    """A short file is no row of a worker that lives, and stops nobody."""
    Path(folder.path, "row.5").touch()
    assert folder.rows() == folder.live_rows() == []


def test_finds_the_dead_beside_a_locked_file_that_is_no_row(folder) -> None:
    """Whoever locked it hides none of those whose names come later."""
    odd = Path(folder.path, "row.0")
    odd.write_bytes(b"\1" * 8 * 16)
    dead = folder.join()
    dead.close()
    with odd.open("r+b") as file:
        rows.lock_for_life(file.fileno())
        found = list(folder.dead_rows(()))
    assert [row.words[IDENT] for row in found] == [dead.words[IDENT]]
    for row in found:
        row.close()
