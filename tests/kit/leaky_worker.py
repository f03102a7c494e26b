"""An engine process whose model fails on request, quoting what it was asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest.mock import patch

from lifecycle_engine import Emitted, Prompt, SimRunner, worker
from lifecycle_zmq import exit_with_parent

prefill, decode = SimRunner.prefill, SimRunner.decode
last = [""]


def leaky_prefill(
    runner: SimRunner, slot: int, prompt: Prompt, start: int, stop: int
) -> Emitted | None:
    """Fail if the prompt says so, and say the prompt."""
    last[0] = words = bytes(i for i in prompt.input_ids if i < 256).decode()
    if "fail-prefill" in words:
        raise ValueError(words)
    return prefill(runner, slot, prompt, start, stop)


def leaky_decode(runner: SimRunner, slots: Sequence[int]) -> list[Emitted]:
    """Fail if the last prompt said so."""
    words, last[0] = last[0], ""
    if "fail-decode" in words:
        secret = words
        raise RuntimeError(secret) from KeyError(words)
    return decode(runner, slots)


if __name__ == "__main__":
    exit_with_parent()
    patch.multiple(SimRunner, prefill=leaky_prefill, decode=leaky_decode).start()
    sys.exit(worker.main())
