"""Endpoints of a link: the value of ``--endpoint``, and the listening IPC socket.

An endpoint is an address and, behind a question mark, inherited descriptors:
``pair:?link=5&liveness=6``, ``ipc:///run/x/engine?listener=5&liveness=6``. So a program
passes its endpoint to `EngineServer` unchanged, whatever the link consists of.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from lifecycle_zmq.transport.base import Connect


def join(address: str, descriptors: dict[str, int]) -> str:
    """Return the endpoint of an address and inherited descriptors."""
    return f"{address}?{urlencode(descriptors)}" if descriptors else address


def split(endpoint: str) -> tuple[str, dict[str, int]]:
    """Return address and descriptors of an endpoint; the reverse of `join`."""
    # The last mark: a directory may have one in its name.
    address, mark, query = endpoint.rpartition("?")
    if not mark:
        return endpoint, {}
    return address, {name: int(value) for name, value in parse_qsl(query)}


def connect_to(address: str) -> Connect:
    """Return a factory of ZeroMQ client transports; imports ZeroMQ."""
    try:
        from lifecycle_zmq.transport.zmq import ZmqClientTransport
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'an ipc:// link needs {error.name}; pip install "anyio-lifecycle[zmq]"',
            name=error.name,
        ) from None
    return partial(ZmqClientTransport, address)


_PREFIX = "lifecycle-zmq-"
_NAME = "engine"
# sockaddr_un has 108 bytes, including the final zero.
_MAX_PATH = 107
_CONNECT_SECONDS = 5.0


class IpcEndpoint:
    """A listening socket in a directory of mode 0700 of its own.

    The API process listens, connects, unlinks the name and only then spawns the engine,
    which inherits the listening socket. No other process can find it afterwards, and a
    process that is killed later leaves nothing in the file system. A process that is
    killed between these three steps, less than a millisecond, leaves an empty
    directory, or one with a stale socket: `remove_stale` removes it at the next start.

    That gap cannot be closed. libzmq connects by name only; an abstract name, which
    needs no file, has no owner and lets other users connect.

    Args:
        parent: Where the directory is made; ``None`` is the system's directory for
            temporary files.

    Raises:
        OSError: There is no such directory, or its path is too long for a socket.
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

    def unlink(self) -> None:
        """Remove the name once the client has connected; blocks for a moment.

        Raises:
            TimeoutError: There was no connection in five seconds.
        """
        # A thread of libzmq is connecting already.
        waiting = select.poll()
        waiting.register(self.listener, select.POLLIN)
        if not waiting.poll(_CONNECT_SECONDS * 1000):
            raise TimeoutError(
                f"no connection to the engine's socket in {_CONNECT_SECONDS:.0f} s"
            )
        self._remove()

    def close(self) -> None:
        """Close this listening socket, and remove the name if it still exists."""
        self.listener.close()
        self._remove()

    def _remove(self) -> None:
        if self._lock is not None:
            _empty(self._directory)
            os.close(self._lock)
            self._lock = None


def remove_stale(parent: Path | None) -> None:
    """Remove directories of processes that were killed before they could."""
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
            # Another process, just starting, removed it as stale.
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
    # Never a whole tree: other files were not created here.
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
