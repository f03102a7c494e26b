"""What the engine's checks share: a model, prompts, an oracle and a clock."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Rig:
    """A random checkpoint, loaded on both sides of the engine.

    Attributes:
        runner: The engine process's side.
        processor: The API process's side.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sizes: dict[str, int],
        device: str,
        dtype: str,
        slots: int,
        tokens: int,
    ) -> None:
        from lifecycle_engine.chat_processor import ChatProcessor
        from lifecycle_engine.checkpoint import Sizes, build
        from lifecycle_engine.transformers_runner import TransformersRunner

        build(folder, sizes=Sizes(**sizes))
        self.tokens = tokens
        self.processor = ChatProcessor(folder)
        self.runner = TransformersRunner.load(
            folder, device=device, dtype=dtype, slots=slots, max_length=2048
        )

    def prepare(self, text: str, *pictures: bytes) -> Any:
        """Run the API side."""
        from lifecycle_engine.processor import Chat, Message

        message = Message("user", [*pictures, text])
        return self.processor.prepare(Chat([message], max_tokens=self.tokens))

    def prompt(self, prepared: Any) -> Any:
        """Make what a runner takes."""
        from lifecycle_engine.runner import Prompt

        return Prompt(prepared.request["input_ids"], dict(prepared.tensors))

    def generate(self, prepared: Any) -> list[int]:
        """Let transformers generate, as the oracle."""
        import torch

        model = self.runner.model
        ids = torch.tensor([prepared.request["input_ids"]], device=model.device)
        extra = {
            name: torch.from_numpy(tensor).to(model.device)
            for name, tensor in prepared.tensors.items()
        }
        if extra:
            extra["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            do_sample=False,
            **extra,
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    def prefill(self, slot: int, prompt: Any) -> int:
        """Run a whole prompt as one chunk; return its token."""
        emitted = self.runner.prefill(slot, prompt, 0, len(prompt.input_ids))
        assert emitted is not None
        assert emitted.token is not None
        return emitted.token

    def decode(self, slots: Sequence[int]) -> list[int]:
        """Run one step; return a token for each slot."""
        return [emitted.item[0] for emitted in self.runner.decode(slots)]

    def stream(self, prepared: Sequence[Any]) -> list[list[int]]:
        """Decode requests together; each joins a step after the one before it."""
        streams: list[list[int]] = []
        while any(len(tokens) < self.tokens for tokens in streams) or not streams:
            live = [
                at for at, tokens in enumerate(streams) if len(tokens) < self.tokens
            ]
            if live:
                for at, token in zip(live, self.decode(live), strict=True):
                    streams[at].append(token)
            if len(streams) < len(prepared):
                slot = len(streams)
                streams.append([self.prefill(slot, self.prompt(prepared[slot]))])
        for slot in range(len(streams)):
            self.runner.free(slot)
        return streams


class Timed:
    """A runner that adds up the time spent in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._runner, name)
        if not callable(value):
            return value

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return value(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def agreement(streams: list[list[int]], wanted: list[list[int]]) -> float:
    """The share of tokens before the first difference of each stream."""
    same = 0
    for tokens, oracle in zip(streams, wanted, strict=True):
        pairs = zip(tokens, oracle, strict=True)
        same += next((at for at, (a, b) in enumerate(pairs) if a != b), len(oracle))
    return same / sum(len(oracle) for oracle in wanted)


def picture(width: int, height: int, *, seed: int = 0) -> bytes:
    """Encode a noisy picture as PNG."""
    from PIL import Image

    noise = random.Random(seed).randbytes(width * height * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(out, "PNG")
    return out.getvalue()


def best(run: Callable[[], object], *, times: int = 5) -> float:
    """Return the fewest seconds of several runs, after one to warm up."""
    run()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
