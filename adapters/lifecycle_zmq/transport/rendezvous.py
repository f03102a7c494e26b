"""Where client and engine meet: a listening socket that has a name for a moment.

The API process listens itself, connects, takes the name away and only then spawns
the engine, which inherits the listening end. Nobody else can find it afterwards, and
whoever is killed later leaves nothing in the file system. What a process leaves that
is killed between these three steps, less than a millisecond, the next one sweeps up:
an empty directory, or one with a socket that nobody listens on.

That moment cannot be closed. libzmq connects by a name alone, so there has to be one;
a name without a file is an abstract one, which has no owner and lets other users
connect; and whoever could remove it for us is started only once it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lifecycle_zmq.transport.endpoints import connect_to

_PREFIX = "lifecycle-zmq-"
_NAME = "engine"
# sockaddr_un takes 108 bytes with the final zero.
_MAX_PATH = 107
_CONNECT_SECONDS = 5.0


class Rendezvous:
    """A listening socket in a directory of mode 0700, both only ours.

    Args:
        parent: Where the directory is made; ``None`` is the system's place for
            temporary files.

    Attributes:
        address: Where to connect, as long as the name is there.
        listener: The listening end; the engine inherits it.
        inherited: Its descriptor, by name.
        connect: How a client gets there.

    Raises:
        OSError: There is no such place, or its path is too long for a socket.
    """

    def __init__(self, parent: Path | None) -> None:
        self._directory, self._lock = _make_directory(parent)
        self.listener = socket.socket(socket.AF_UNIX)
        path = self._directory / _NAME
        self.address = f"ipc://{path}"
        try:
            _check_length(path)
            self.listener.bind(str(path))
            self.listener.listen()
            self.listener.setblocking(False)
            self.inherited = {"listener": self.listener.fileno()}
            self.connect = connect_to(self.address)
        except BaseException:
            self.close()
            raise

    def hide(self) -> None:
        """Take the name away once somebody has connected; blocks for a moment.

        Raises:
            TimeoutError: Nobody did in five seconds.
        """
        # Connecting is the work of a thread of libzmq that is at it already.
        waiting = select.poll()
        waiting.register(self.listener, select.POLLIN)
        if not waiting.poll(_CONNECT_SECONDS * 1000):
            raise TimeoutError(
                f"no connection to the engine's socket in {_CONNECT_SECONDS:.0f} s"
            )
        self._remove()

    def close(self) -> None:
        """Close our listening end, and take the name away if it is still there."""
        self.listener.close()
        self._remove()

    def _remove(self) -> None:
        if self._lock is not None:
            _empty(self._directory)
            os.close(self._lock)
            self._lock = None


def sweep(parent: Path | None) -> None:
    """Remove the directories of processes that were killed before they could."""
    place = parent if parent is not None else Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        for directory in place.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), _locked(directory):
                _empty(directory)


def _make_directory(parent: Path | None) -> tuple[Path, int | None]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            return directory, _lock(directory)
        except (FileNotFoundError, BlockingIOError):
            # Taken for a dead process's, by another one that started just now.
            continue
        except BaseException:
            _empty(directory)
            raise


def _lock(directory: Path) -> int:
    lock = os.open(directory, os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.stat()
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid != os.getuid():
            raise PermissionError(f"{directory} is not ours")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _empty(directory: Path) -> None:
    # Never a whole tree: what is not the socket was not put there by us.
    with contextlib.suppress(OSError):
        (directory / _NAME).unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _MAX_PATH:
        raise OSError(
            f"the path of the engine's socket has {length} bytes, the system takes "
            f"{_MAX_PATH}; set TMPDIR to a shorter path, or pass a shorter directory="
        )
