"""A process with an arena and a peer; says what there is, and waits. A script."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from lifecycle_zmq import Arena

SIZE = 32 * 2**20


def main() -> None:
    """Fill an arena, let a peer see it, and wait to be killed."""
    arena = Arena(SIZE, kind=cast("Any", sys.argv[1]))
    array = arena.empty(SIZE, np.uint8)
    array[:] = 1
    descriptor = arena.descriptor
    assert descriptor is not None
    peer = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("arena_peer.py")),
            str(descriptor),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    assert json.loads(peer.stdout.readline()) == "ready"
    peer.stdin.write(json.dumps(["take", 1, "a", 0, "B", [SIZE]]).encode() + b"\n")
    peer.stdin.flush()
    seen = json.loads(peer.stdout.readline())
    print(json.dumps([peer.pid, seen]), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
