"""How much memory this process may have: of its cgroup, or of the machine."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from lifecycle_asgi.media_profiles import server_of

MAX_BUDGET: Final = 4 * 2**30
"""Budget where there is memory for more, in bytes."""

# The other half is for the server itself, for what allocators keep, and for what an
# estimate misses.
_PART: Final = 0.5
# Version 1 writes the largest number of pages where there is no limit.
_UNLIMITED: Final = 2**62


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What the kernel lets this process have.

    Attributes:
        bytes: In bytes.
        owner: Whose memory it is, in words.
        stat: The file that says what is in use of it, if it is that of a cgroup.
    """

    bytes: int
    owner: str
    stat: Path | None = None

    @property
    def budget(self) -> int:
        """Bytes for requests: half of this limit, and 4 GiB at most."""
        return max(1, min(MAX_BUDGET, int(self.bytes * _PART)))


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the lowest limit on the memory of this process; ``None`` if unknown.

    That of its control group (version 1 or 2) or of a group around that, as in a
    container, or else what the machine has.

    Args:
        root: Folder with ``proc`` and ``sys``.
    """
    found = [MemoryLimit(most, "this cgroup", it) for most, it in _group_limits(root)]
    machine = _machine_bytes()
    if machine is not None:
        found.append(MemoryLimit(machine, "this machine"))
    return min(found, key=lambda each: each.bytes, default=None)


def default_budget() -> int:
    """Return the bytes for requests, where none are set."""
    limit = memory_limit()
    return MAX_BUDGET if limit is None else limit.budget


def explain(budget: int) -> str:
    """Say what requests may use, and what that comes from if nobody set it."""
    limit = memory_limit()
    text = f"requests may use {size_text(budget)} of memory"
    if limit is None or budget != limit.budget:
        return text
    return f"{text}, as {limit.owner} has {size_text(limit.bytes)}"


def body_text(most: int | None) -> str:
    """Return the end of a line on a budget that leaves *most* bytes to one body."""
    return "" if most is None else f"; a body may have {size_text(most)}"


def announce(budget: int, *, shared: str | None, body: int | None = None) -> None:
    """Log what a budget comes from, or that it is more memory than there is.

    Args:
        budget: Bytes for requests.
        shared: Folder by which all worker processes share it.
        body: Bytes that one body may have, if the budget permits no more.
    """
    limit = memory_limit()
    if limit is None:
        return
    # vLLM shows what its own loggers say, and of others warnings.
    in_vllm = server_of("auto") == "vllm"
    log = logging.getLogger("vllm.lifecycle" if in_vllm else "lifecycle")
    mib = (budget / 2**20, limit.bytes / 2**20, limit.owner)
    most = body_text(body)
    if budget > limit.bytes:
        log.warning(
            "Admission: %.0f MiB for requests is more than the %.0f MiB that %s has; "
            "give fewer bytes, or the kernel ends the server before they are full%s",
            *mib,
            most,
        )
    if shared is not None:
        log.info(
            "Admission: %.0f MiB, of %.0f MiB that %s has, for the requests of all "
            "worker processes that share %s%s",
            *mib,
            shared,
            most,
        )
    elif is_worker():
        log.warning(
            "Admission: %.0f MiB for requests in each worker process, of %.0f MiB that "
            "%s has; if there are several, name a folder with shared= or "
            "LIFECYCLE_SHARED, and they have one budget together%s",
            *mib,
            most,
        )
    elif budget == limit.budget < MAX_BUDGET:
        log.info(
            "Admission: %.0f MiB for requests, as %.0f MiB is what %s has; "
            "LIFECYCLE_BYTES sets another budget%s",
            *mib,
            most,
        )
    elif budget <= limit.bytes:
        log.info(
            "Admission: %.0f MiB for requests, of %.0f MiB that %s has%s", *mib, most
        )


def is_worker() -> bool:
    """Whether a server has started this process as one of several.

    The servers are uvicorn, hypercorn, gunicorn, vLLM, Granian, BentoML and LitServe.
    With the last three, the first of several workers does not know of the others.
    """
    started: Any = sys.modules.get("multiprocessing.process")
    process = started and started.current_process()
    config: Any = getattr(process, "_kwargs", {}).get("config")
    if type(config).__module__ == "uvicorn.config":
        # Of a process that was started to reload the application, there is one.
        return bool(config.workers > 1 and not config.should_reload)
    if type(config).__module__ == "hypercorn.config":
        return bool(config.workers > 1)
    name = getattr(process, "name", "")
    if name == "granian-worker":
        number = next(iter(getattr(process, "_args", ())), None)
        return isinstance(number, int) and number > 1
    for each in (name, threading.current_thread().name):
        if each.startswith("LitServer-"):
            return each != "LitServer-0"
    bento = getattr(
        sys.modules.get("bentoml._internal.context"), "server_context", None
    )
    if (getattr(bento, "worker_index", None) or 1) > 1:
        return True
    return name.startswith("ApiServer_") or "gunicorn.arbiter" in sys.modules


def size_text(nbytes: float) -> str:
    """Return *nbytes* with a unit, as ``12.0 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def _group_limits(root: Path) -> Iterator[tuple[int, Path]]:
    try:
        mine = root / "proc" / "self" / "cgroup"
        groups = mine.read_text("utf-8", "surrogateescape")  # names are any bytes
    except OSError:  # not Linux
        return
    for controllers, name in re.findall(r"^\d+:([^:]*):(/.*)$", groups, re.MULTILINE):
        if not controllers:
            folder, file = Path(), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = Path("memory"), "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own group as the root, and name it as the host does.
        path = PurePosixPath(name)
        for group in reversed((path, *path.parents)):
            inside = root / "sys/fs/cgroup" / folder / group.relative_to("/")
            stat = inside / "memory.stat"  # knows groups that a container hides
            for each in (inside / file, ""), (stat, "hierarchical_memory_limit"):
                if (limit := _read(*each)) is not None:
                    yield limit, stat


def _read(file: Path, name: str) -> int | None:
    try:
        text = file.read_text()
        limit = int(text[text.index(name) + len(name) :].split()[0])
    except (OSError, ValueError, LookupError):  # no such group, or "max"
        return None
    return limit if 0 < limit < _UNLIMITED else None


def _machine_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on this system
        return None
