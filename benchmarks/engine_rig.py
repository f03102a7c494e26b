"""Shared parts of the engine's benchmarks: a model, prompts, an oracle and timers."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        family: str = "qwen2_5_vl",
        graphs: str = "off",
        max_length: int = 4096,
    ) -> None:
        from lifecycle_engine import ChatProcessor, TransformersRunner
        from tiny_checkpoint import Sizes, build

        if not (folder / "config.json").exists():
            build(folder, family, sizes=Sizes(**sizes), dtype=dtype)
        self.tokens = tokens
        self.processor = ChatProcessor(folder)
        self.runner = TransformersRunner.load(
            folder,
            device=device,
            dtype=dtype,
            slots=slots,
            max_length=max_length,
            graphs=graphs,  # type: ignore[arg-type]  # one of its words
        )

    def prepare(self, text: str, *pictures: bytes, **options: Any) -> Any:
        """Run the API side."""
        from lifecycle_engine import Chat, Message

        message = Message("user", [*pictures, text])
        return self.processor.prepare(Chat([message], self.tokens, **options))

    def prompt(self, prepared: Any) -> Any:
        """Return the runner's prompt of a prepared chat."""
        from lifecycle_engine import Prompt

        return Prompt(prepared.request["input_ids"], dict(prepared.tensors))

    def generate(self, prepared: Any) -> list[int]:
        """Return the tokens of transformers' own `generate`, the oracle."""
        ids, extra = self._inputs(prepared, ())
        if not prepared.request["stop_ids"]:
            extra["eos_token_id"] = None
        output = self.runner.model.generate(
            input_ids=ids, max_new_tokens=self.tokens, do_sample=False, **extra
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    def preference(
        self, prepared: Any, after: Sequence[int], token: int, other: int
    ) -> float:
        """Return how much the oracle prefers *token* to *other* after those tokens.

        In standard deviations of all logits.
        """
        ids, extra = self._inputs(prepared, after)
        output = self.runner.model.generate(
            input_ids=ids,
            max_new_tokens=1,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **extra,
        )
        logits = output.logits[0][0].double()
        return float((logits[token] - logits[other]) / logits.std())

    def _inputs(
        self, prepared: Any, after: Sequence[int]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the ids of a prompt and part of an answer, and what goes along."""
        import torch

        model, prompt = self.runner.model, prepared.request["input_ids"]
        ids = torch.tensor([[*prompt, *after]], device=model.device)
        extra = {
            name: torch.from_numpy(tensor).to(model.device)
            for name, tensor in prepared.tensors.items()
        }
        extra["attention_mask"] = torch.ones_like(ids)
        if "image_grid_thw" in extra:
            kinds = (ids == model.config.image_token_id).int()
            kinds[:, len(prompt) :] = 0
            extra["mm_token_type_ids"] = kinds
        return ids, extra

    def generate_batch(self, prepared: Sequence[Any]) -> Any:
        """Run transformers' `generate` on one batch, padded on the left."""
        import torch

        prompts = [each.request["input_ids"] for each in prepared]
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.runner.model.device
        return self.runner.model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=self.tokens,
            do_sample=False,
            eos_token_id=None,
        )

    def generate_continuously(self, prepared: Sequence[Any]) -> Any:
        """Run transformers' own continuous batching."""
        import transformers

        return self.runner.model.generate_batch(
            [each.request["input_ids"] for each in prepared],
            generation_config=transformers.GenerationConfig(
                max_new_tokens=self.tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=64, max_batch_tokens=1024
            ),
        )

    def prefill(self, slot: int, prompt: Any) -> int:
        """Run a whole prompt as one chunk; return its token."""
        emitted = self.runner.prefill(slot, prompt, 0, len(prompt.input_ids))
        assert emitted is not None
        assert emitted.token is not None
        return emitted.token

    def decode(self, slots: Sequence[int]) -> list[int]:
        """Run one step; return a token for each slot."""
        tokens = []
        for made in self.runner.decode(slots):
            if isinstance(made, Exception):
                raise made
            assert not isinstance(made, list)
            tokens.append(made.item[0])
        return tokens

    def stream(self, prepared: Sequence[Any], *, chunk: int = 10**6) -> list[list[int]]:
        """Decode requests together, with prompts prefilled in chunks between steps."""
        streams: list[list[int]] = []
        reading: tuple[Any, int] | None = None
        while len(streams) < len(prepared) or any(True for _ in self._open(streams)):
            live = list(self._open(streams))
            if live:
                for at, token in zip(live, self.decode(live), strict=True):
                    streams[at].append(token)
            if len(streams) < len(prepared):
                prompt, start = reading or (self.prompt(prepared[len(streams)]), 0)
                stop = min(start + chunk, len(prompt.input_ids))
                made = self.runner.prefill(len(streams), prompt, start, stop)
                reading = (prompt, stop) if made is None else None
                if made is not None:
                    streams.append(list(made.item))
        for slot in range(len(streams)):
            self.runner.free(slot)
        return streams

    def resume(self, prepared: Any) -> list[int]:
        """Run a prompt, and the same one again as the next turn in its slot."""
        from lifecycle_engine import Prompt

        ids = prepared.request["input_ids"]
        self.prefill(0, Prompt(ids, dict(prepared.tensors), session=True))
        self.decode([0])
        again = Prompt(ids, dict(prepared.tensors), session=True)
        start = self.runner.resume(0, again)
        assert start == len(ids) - 1
        made = self.runner.prefill(0, again, start, len(ids))
        assert made is not None
        tokens = list(made.item)
        while len(tokens) < self.tokens:
            tokens += self.decode([0])
        self.runner.free(0)
        return tokens

    def _open(self, streams: list[list[int]]) -> Iterator[int]:
        return (at for at, made in enumerate(streams) if len(made) < self.tokens)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(each.numel() for each in self.runner.model.parameters())


@contextmanager
def rig(folder: Path | None = None, **options: Any) -> Iterator[Rig]:
    """Yield a rig in *folder*, or in a temporary one; then free its device memory."""
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        made = Rig(folder or Path(temporary), **options)
        yield made
        # The rig may live on in its user's frame; what it holds must not.
        del made.runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Free:
    """A model that takes no time, to measure the code around it."""

    max_length, vocab_size = 8192, 16
    keep: Sequence[str] = ()

    def __init__(self, *, slots: int) -> None:
        from lifecycle_engine import Emitted

        self.slots, self._one = slots, Emitted([1], 1)

    def check(self, prompt: Any) -> None:
        """Accept any prompt."""

    def needs_tensors_until(self, prompt: Any) -> int:
        """Return 0: there are no tensors."""
        del prompt
        return 0

    def prefill(self, slot: int, prompt: Any, start: int, stop: int) -> Any:
        """Emit a token after the last chunk."""
        del slot, start
        return self._one if stop == len(prompt.input_ids) else None

    def decode(self, slots: Sequence[int]) -> list[Any]:
        """Emit the same token for each slot."""
        return [self._one] * len(slots)

    def free(self, slot: int) -> None:
        """Do nothing."""

    def status(self) -> dict[str, Any]:
        """Return no counters."""
        return {}


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


def machine() -> str:
    """Name the processor and how many of its cores there are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
    return f"{name}, {os.cpu_count()} cores"


def first_difference(made: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many tokens two equally long answers share at their start."""
    pairs = enumerate(zip(made, wanted, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(wanted))


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
