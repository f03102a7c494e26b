"""``lifecycle doctor``: checks the machine and its packages, with remedies.

Each check is a function that yields its findings. No check changes anything or needs
the network.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

# Enough for a thousand connections and an engine.
_DESCRIPTORS = 4096
# Leaves room for the socket's name below the 108 bytes of sys/un.h.
_SOCKET_PATH = 60
_SHARED = "/dev/shm"  # noqa: S108 - inspected, not used
_SHARED_BYTES = 2**30
# Distributions by the extra that installs them.
_EXTRAS = {
    "media": ("pillow",),
    "zmq": ("pyzmq", "msgpack", "numpy"),
    "ray": ("ray",),
    "engine": ("torch", "transformers", "starlette", "uvicorn", "pillow", "numpy"),
    "observe": ("structlog", "prometheus-client", "opentelemetry-api"),
    "tools": (
        *("typer", "rich", "psutil", "httpx2", "textual"),
        *("uvicorn", "h11", "httptools", "pillow"),
    ),
}
_FASTER = {"httptools": "parses requests faster", "uvloop": "is a faster event loop"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        state: ``"bad"`` is an error, ``"note"`` a possible improvement.
        what: The thing that was checked.
        found: Its state on this machine.
        remedy: What to do about it; empty if it is fine.
    """

    state: Literal["fine", "note", "bad"]
    what: str
    found: str
    remedy: str = ""


def examine(
    checkpoint: Path | None = None, *, slots: int = 8, max_length: int | None = None
) -> Iterator[Finding]:
    """Run every check, cheap ones first.

    Args:
        checkpoint: The checkpoint to serve; ``None`` skips the memory estimate.
        slots: Number of KV slots to serve it with.
        max_length: Tokens of each slot; ``None`` is the default of `serve`.
    """
    for check in _CHECKS:
        yield from check()
    if checkpoint is not None:
        yield _memory_of(checkpoint, slots, max_length)


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    yield Finding("fine", "Python", found)


def _names() -> Iterator[Finding]:
    # An old, unrelated distribution installs a package of the same name.
    if _version("lifecycle") is not None:
        remedy = "pip uninstall lifecycle, then install anyio-lifecycle once more"
        yield Finding(
            "bad", "names", "the distribution `lifecycle` is installed", remedy
        )


def _extras() -> Iterator[Finding]:
    for extra, needed in _EXTRAS.items():
        versions = {name: _version(name) for name in needed}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            remedy = f'pip install "anyio-lifecycle[{extra}]", if you want it'
            found = f"{', '.join(missing)} missing"
            yield Finding("note", f"extra {extra}", found, remedy)
        else:
            found = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield Finding("fine", f"extra {extra}", found)
    for name, why in _FASTER.items():
        if (version := _version(name)) is not None:
            yield Finding("fine", name, version)
        else:
            yield Finding("note", name, "missing", f"pip install {name}; it {why}")


def _torch() -> Iterator[Finding]:
    if _version("torch") is None:
        return
    import torch

    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # fewer in a container
        cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        built = torch.version.cuda
        remedy = "check nvidia-smi and the driver" if built else ""
        found = f"{torch.__version__}, no device" + (f" for CUDA {built}" * bool(built))
        yield Finding("note" if built else "fine", "torch", found, remedy)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found = f"{name}: {free >> 20} of {total >> 20} MiB free"
        yield Finding("fine", f"cuda:{index}", found)
    if threads >= cores > 1:
        remedy = "leave a core to the server: set OMP_NUM_THREADS lower"
        found = f"{threads} threads on {cores} cores"
        yield Finding("note", "torch threads", found, remedy)


def _memory_of(checkpoint: Path, slots: int, max_length: int | None) -> Finding:
    try:
        import torch

        from lifecycle_engine.model.loader import estimate_memory

        cuda = torch.cuda.is_available()
        size = estimate_memory(checkpoint, cuda=cuda, max_length=max_length)
    except ImportError as error:
        found = f"{error.name} missing"
        return Finding(
            "bad", "KV slots", found, 'pip install "anyio-lifecycle[engine]"'
        )
    except (OSError, ValueError) as error:
        # Only the first line: transformers adds advice about its hub.
        found = str(error).partition("\n")[0]
        return Finding("bad", "checkpoint", found, "name another with --checkpoint")
    all_of_them = (slots + 1) * size.slot
    found = (
        f"each {size.slot / 2**20:.1f} MiB, for {size.max_length} tokens in "
        f"{size.dtype}; {slots} and one for padding {all_of_them / 2**20:.1f} MiB, "
        f"beside {size.weights / 2**20:.1f} MiB of weights"
    )
    if cuda and all_of_them + size.weights > torch.cuda.mem_get_info()[0]:
        remedy = (
            "not enough free memory: use fewer --kv-slots or a smaller --max-length"
        )
        return Finding("bad", "KV slots", found, remedy)
    return Finding("fine", "KV slots", found)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _DESCRIPTORS:
        remedy = f"ulimit -n {min(hard, 65536)}" if hard > soft else "raise the limit"
        yield Finding("note", "open files", f"at most {soft}", remedy)
    else:
        yield Finding("fine", "open files", f"at most {soft}")


def _memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("doctor"))
        yield Finding("fine", "memfd", "available")
    except (AttributeError, OSError):  # not in this Python, kernel or sandbox
        remedy = "payloads travel through shared memory files or sockets instead"
        yield Finding("note", "memfd", "not on this system", remedy)
    try:
        free = shutil.disk_usage(_SHARED).free
    except OSError:
        return
    remedy = "docker run --shm-size 4g" if free < _SHARED_BYTES else ""
    state: Literal["fine", "note"] = "note" if remedy else "fine"
    yield Finding(state, _SHARED, f"{free >> 20} MiB free", remedy)


def _processes() -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        found = "available: an engine's exit is detected at once"
        yield Finding("fine", "pidfd", found)
    except (AttributeError, OSError):
        remedy = "a thread waits for the engine instead"
        yield Finding("note", "pidfd", "not on this system", remedy)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        remedy = "start it in the foreground, or stop it with SIGTERM"
        yield Finding("note", "SIGINT", "ignored: Ctrl+C has no effect", remedy)


def _places() -> Iterator[Finding]:
    path = Path(tempfile.gettempdir())
    size = len(os.fsencode(path))
    if size > _SOCKET_PATH:
        remedy = "set TMPDIR to a shorter path: sockets are created there"
        yield Finding("bad", "temporary files", f"path of {size} bytes", remedy)
    elif not os.access(path, os.W_OK | os.X_OK):
        remedy = "set TMPDIR to a writable folder"
        yield Finding("bad", "temporary files", f"{path} is read only", remedy)
    else:
        yield Finding("fine", "temporary files", str(path))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _names,
    _extras,
    _limits,
    _memory,
    _processes,
    _places,
    _torch,
)
