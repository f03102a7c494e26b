"""An engine process whose model fails on request, quoting what it was asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lifecycle_engine import sim_runner, worker
from lifecycle_engine.runner import Emitted, Prompt
from lifecycle_zmq import exit_with_parent


class LeakyRunner(sim_runner.SimRunner):
    """Fails in prefill or in decode where the prompt says so, and says the prompt."""

    words = ""

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Fail if the prompt says so."""
        self.words = bytes(i for i in prompt.input_ids if i < 256).decode()
        if "fail-prefill" in self.words:
            raise ValueError(self.words)
        return super().prefill(slot, prompt, start, stop)

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        """Fail if the last prompt said so."""
        words, self.words = self.words, ""
        if "fail-decode" in words:
            secret = words
            raise RuntimeError(secret) from KeyError(words)
        return super().decode(slots)


if __name__ == "__main__":
    exit_with_parent()
    sim_runner.SimRunner = LeakyRunner  # type: ignore[misc]
    sys.exit(worker.main())
