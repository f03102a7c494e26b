"""A shared gate in a folder that others touch: foreign files, no room, no folder."""

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import struct
import sys
import threading

import anyio
import pytest
from shared_kit import Process, Workers, leads, wait_until

from lifecycle import GateClosed, GateFull

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="OFD locks")

GARBAGE = b"\xff" * 4096
# Where a row has them: what it admitted, and what it refused.
ADMITTED, REFUSED = 6 * 8, 7 * 8
WRITE_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@pytest.fixture
def workers(tmp_path):
    made = Workers(tmp_path / "gate")
    yield made
    made.close()


def admit_soon(gate):
    """Return a lease of this gate, once it has a leader and what it needs is free."""
    leases = []

    def admitted():
        with contextlib.suppress(GateFull):
            leases.append(gate.try_admit())
        return leases

    wait_until(admitted)
    return leases[0]


FOREIGN = {
    "garbage": ("row.zzz", lambda path: path.write_bytes(GARBAGE)),
    "zeros": ("row.5", lambda path: path.write_bytes(bytes(128))),
    "short": ("row.6", lambda path: path.write_bytes(b"")),
    "folder": ("row.zzz", lambda path: path.mkdir()),
    "pipe": ("row.zzz", os.mkfifo),
    "link": ("row.zzz", lambda path: path.symlink_to("/dev/null")),
    "unborn folder": ("new.zzz", lambda path: path.mkdir()),
    "leader's copy": ("leader.1~", lambda path: path.write_bytes(GARBAGE)),
    "leader's folder": ("leader.7", lambda path: path.mkdir()),
    "leader's garbage": ("leader.7", lambda path: path.write_bytes(GARBAGE)),
    "leader beyond": ("leader." + "9" * 30, lambda path: path.write_bytes(GARBAGE)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_goes_on_beside_a_foreign_file(workers, kind, caplog) -> None:
    """What no worker wrote stops none, and each worker names a row like that once."""
    name, make = FOREIGN[kind]
    first, second = workers(slots=1), workers(slots=1)
    make(workers.folder / name)
    admit_soon(first).release()
    admit_soon(second).release()
    first.close()
    wait_until(lambda: leads(second))
    admit_soon(second).release()
    assert second.statistics().admitted == second.statistics().released == 3
    told = [each.getMessage() for each in caplog.records]
    if name.startswith("row."):
        assert os.access(workers.folder / name, os.F_OK, follow_symlinks=False)
        what = f"{workers.folder / name} is no row; remove it"
        assert told == [what, what]
    else:
        assert not told


def test_needs_no_names_of_locks(workers, monkeypatch) -> None:
    """A Python that was built for an old glibc has none, on a kernel with locks."""
    for name in ("F_OFD_GETLK", "F_OFD_SETLK", "F_OFD_SETLKW"):
        monkeypatch.delattr(fcntl, name, raising=False)
    first, second = workers.two(slots=1)
    admit_soon(second).release()
    assert first.statistics().admitted == 1


def test_tells_that_there_are_no_locks(workers, monkeypatch) -> None:
    """As in an old kernel, in some sandboxes and on some file systems."""

    def has_none(*arguments):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    gate = workers(slots=1)
    monkeypatch.setattr(fcntl, "fcntl", has_none)
    with pytest.raises(OSError, match="needs locks of open files") as caught:
        gate.try_admit()
    assert caught.value.errno == errno.EINVAL


def test_names_the_folder_that_a_worker_cannot_join(workers) -> None:
    """A row is written whole, so that a full file system is told of at once."""
    gate = workers(slots=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="cannot join the shared gate: it") as caught:
            gate.try_admit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(workers.folder)
    assert list(workers.folder.iterdir()) == []
    admit_soon(gate).release()


def test_tells_the_same_of_a_folder_that_became_another(workers) -> None:
    """The error says what the folder is for, and nothing else."""
    gate = workers(slots=1)
    workers.folder.rmdir()
    workers.folder.write_text("")
    with pytest.raises(OSError, match="it is to be a shared gate's folder") as caught:
        gate.try_admit()
    assert "cannot join" not in str(caught.value)


def test_keeps_what_a_worker_holds_whose_row_was_copied(workers) -> None:
    """The copy of a row is nobody's: its end is not that of the worker."""
    first = workers(slots=1)
    admit_soon(first).release()
    before = set(workers.folder.glob("row.*"))
    holder = Process(workers.folder, slots=1)
    try:
        assert holder.ask("admit", "it", {})[:2] == ["got", "it"]
        (row,) = set(workers.folder.glob("row.*")) - before
        shutil.copy(row, row.with_name("row.zzz"))
        holder.stop()
        for each in (workers(slots=1), workers(slots=1)):
            first.close()
            full = []

            def asked(each=each, full=full):
                with pytest.raises(GateFull) as found:
                    each.try_admit()
                full.append("no leader" not in str(found.value))
                return full[-1]

            wait_until(asked)
            assert row.exists() and each.statistics().slots_in_use == 1
            first = each
    finally:
        holder.close()
    admit_soon(first).release()


def test_admits_nothing_beside_a_locked_row_of_garbage(workers, caplog) -> None:
    """Nobody can tell what its process holds, if that is a worker."""
    gate, row = workers(slots=1), workers.folder / "row.zzz"
    row.write_bytes(GARBAGE)
    with row.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, WRITE_LOCK)
        for _ in range(2):
            with pytest.raises(GateFull, match="no leader"):
                gate.try_admit()
        assert caplog.text.count("row.zzz is no row, and locked; end the process") == 1
    admit_soon(gate).release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_refuses_all_at_once_after_an_error_that_refusing_meets(
    workers, caplog
) -> None:
    """Whatever ends the thread, all who wait hear of it, though no count goes on."""
    gate = workers(slots=1)
    lease, refused = admit_soon(gate), []
    (row,) = workers.folder.glob("row.*")

    def ask():
        try:
            anyio.run(gate.admit)
        except GateClosed as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    wait_until(lambda: gate.statistics().waiting == 3)
    with row.open("r+b") as file:
        for word in (ADMITTED, REFUSED):
            file.seek(word)
            file.write(b"\xff" * 8)
    lease.release()
    for each in threads:
        each.join(60)
    assert len(refused) == 3 and not gate.statistics().waiting
    assert all("ended by an error in its thread; restart" in each for each in refused)
    wait_until(lambda: "restart the worker" in caplog.text)
    assert caplog.text.count("restart the worker") == 1


def test_refuses_where_its_folder_was_removed_until_it_is_restarted(
    workers, caplog
) -> None:
    """A worker that joins later makes the folder anew, as the guide says."""
    joined, late = workers(slots=1), workers(slots=1)
    admit_soon(joined).release()
    shutil.rmtree(workers.folder)
    wait_until(lambda: "was removed or replaced; restart all" in caplog.text)
    for _ in range(2):
        with pytest.raises(GateClosed, match="was removed or replaced; restart all"):
            joined.try_admit()
    assert caplog.text.count("restart all") == 1 and not workers.folder.exists()
    admit_soon(late).release()
    with pytest.raises(GateClosed):
        joined.try_admit()


@pytest.mark.parametrize("whose", ["leader", "follower"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_ends_a_worker_whose_row_was_removed(workers, caplog, whose, how) -> None:
    """Nobody would count what it holds; the other worker goes on."""
    first = workers(slots=2)
    admit_soon(first).release()
    (row,) = workers.folder.glob("row.*")
    second = workers(slots=2)
    admit_soon(second).release()
    ended, other = first, second
    if whose == "follower":
        (row,) = set(workers.folder.glob("row.*")) - {row}
        ended, other = second, first
    lease = admit_soon(ended)
    if how == "replaced":
        shutil.copy(row, row.with_name("copy"))
        row.with_name("copy").replace(row)
    else:
        row.unlink()
    wait_until(lambda: f"lost {row}, which was removed or replaced" in caplog.text)
    with pytest.raises(GateClosed, match=r"row\..* was removed or replaced; restart"):
        ended.try_admit()
    wait_until(lambda: leads(other))
    admit_soon(other).release()
    lease.release()
    wait_until(lambda: not lease.held)
