"""Real checkpoints behind the runner protocol.

Model code and loading are transformers'. Ours: the KV rows, per-request
positions, and one batched step for whichever requests are running.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lifecycle_engine.runner import Emitted, Prompt, Sampling

from .device import told_if_lost
from .families import family_of, hold_frequencies, longest_of
from .generation import Ruled, Rules
from .graphs import Eager, Fixed, GraphMode, Lane
from .held import Held
from .kv import SlotCache
from .loading import load_model
from .passes import Passes
from .sampling import Sampler, choose
from .seating import Seat, Seating
from .uploads import small
from .vision import needed_until, pictures_of

MAX_LENGTH = 8192


class TransformersRunner:
    """A vision-language (or text) model of transformers on one device.

    Attributes:
        model: The loaded model.
        cache: Its KV rows.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_batch: int | None = None,
        max_length: int | None = None,
        graphs: GraphMode = "off",
        buckets: Sequence[int] = (),
    ) -> None:
        """Allocate the KV rows for a loaded model.

        Args:
            model: In eval mode on its device, with ``sdpa`` attention.
            slots: Requests that can hold KV at a time.
            max_batch: Those of them that are read or run at a time, which graphs are
                made for; ``None`` is all. The scheduler's should be no more.
            max_length: Positions of each slot; ``None`` is what the model takes, up
                to 8192.
            graphs: How decode steps run: ``"off"`` as they come, ``"on"`` as CUDA
                graphs of a few fixed shapes, ``"fake"`` with the same shapes and
                memory but without capture.
            buckets: Batch sizes of the graphs; none are the powers of two.

        Raises:
            ValueError: A family, a generation config or a length that cannot run, or
                graphs without CUDA.
        """
        config = model.config.get_text_config()
        limit = longest_of(config)
        max_length = max_length or min(limit, MAX_LENGTH)
        if not 2 <= max_length <= limit:
            raise ValueError(
                f"max_length is {max_length}; the model takes 2 to {limit}"
            )
        if graphs == "on" and model.device.type != "cuda":
            raise ValueError(f"graphs is on, the device {model.device}; they need cuda")
        self.model = model
        self.slots, self.max_length = slots, max_length
        self.vocab_size: int = config.vocab_size
        self._family = family_of(model.config)
        hold_frequencies(model)
        self.keep = self._family.keep
        self.cache = SlotCache.of(model, slots=slots, max_length=max_length)
        self._ruled = Ruled(
            Rules.of(model.generation_config),
            slots=slots,
            vocab_size=self.vocab_size,
            device=model.device,
        )
        self._passes = Passes(model, self._family, self.cache)
        self._seats = Seating(self.cache, slots=slots, max_length=max_length)
        self._steps: Eager | Fixed
        if graphs == "off":
            self._steps = Eager(self._passes.step, slots=slots, device=model.device)
        else:
            self._steps = Fixed(
                self._passes.step,
                slots=slots,
                max_length=max_length,
                device=model.device,
                widest=max_batch,
                widths=buckets,
                capture=graphs == "on",
            )

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        slots: int = 8,
        max_batch: int | None = None,
        max_length: int | None = None,
        graphs: GraphMode = "off",
        buckets: Sequence[int] = (),
    ) -> TransformersRunner:
        """Load a checkpoint folder through `from_pretrained`, never a network.

        Args:
            checkpoint: A local folder.
            device: ``"cpu"`` or ``"cuda"``.
            dtype: Name of a torch dtype, or ``"auto"`` for the checkpoint's own.
            threads: CPU threads of the whole process; ``None`` leaves torch's.
            slots: Requests that can hold KV at a time.
            max_batch: See `__init__`.
            max_length: See `__init__`.
            graphs: See `__init__`; their shapes are captured before this returns.
            buckets: See `__init__`.

        Raises:
            OSError: No checkpoint there.
            ValueError: No such device, or a model or sizes that cannot run.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        model = load_model(checkpoint, device=device, dtype=dtype)
        runner = cls(
            model,
            slots=slots,
            max_batch=max_batch,
            max_length=max_length,
            graphs=graphs,
            buckets=buckets,
        )
        if graphs == "on":
            runner.capture()
        runner.try_out()
        return runner

    def try_out(self) -> None:
        """Read a token and draw two, so that what cannot run is told now.

        Raises:
            ValueError: It cannot.
        """
        try:
            self.prefill(0, Prompt([0], {}, Sampling()), 0, 1)
            (made,) = self.decode([0])
            if isinstance(made, Exception):
                raise made
            self.free(0)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the model does not run: {type(error).__name__}: {first}"
            ) from error

    def capture(self) -> None:
        """Make the graphs of all shapes, so that no request waits for one."""
        if isinstance(self._steps, Fixed):
            with told_if_lost(self.model.device), torch.inference_mode():
                self._steps.prepare()

    def check(self, prompt: Prompt) -> None:
        """Refuse image tensors that do not fit the prompt or the model."""
        self._family.check(prompt)

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return the position behind the last image token."""
        return needed_until(self._family, prompt)

    def resume(self, slot: int, prompt: Prompt) -> int:
        """Keep what a slot holds already of a further prompt; return how much."""
        with told_if_lost(self.model.device), torch.inference_mode():
            self._family.begin(self.model, prompt)
            return self._seats.keep(slot, Sampler(prompt.sampling), self._held(prompt))

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Run a chunk of the prompt and its images; the last one draws a token."""
        with told_if_lost(self.model.device), torch.inference_mode():
            if not start:
                held = self._held(prompt) if prompt.session else None
                self._seats.take(slot, Sampler(prompt.sampling), held)
                self._family.begin(self.model, prompt)
            return self._prefill(slot, prompt, start, stop)

    def decode(self, slots: Sequence[int]) -> list[Emitted | Exception]:
        """Run one token of each slot; return the next ones."""
        seats = [self._seats[slot] for slot in slots]
        with told_if_lost(self.model.device), torch.inference_mode():
            width = self._seats.pack(slots, self._steps.width)
            lanes = [
                Lane(seat.row, seat.token, seat.length, seat.delta) for seat in seats
            ]
            rows = small([seat.row for seat in seats], self.model.device)
            logits = self._steps.run(lanes, width)
            made = logits[rows]
            ruled = self._ruled.next(
                slots,
                [seat.token for seat in seats],
                [seat.length + 1 for seat in seats],
                made,
            )
            emitted = choose(ruled, [seat.sampler for seat in seats], made)
        for seat, each in zip(seats, emitted, strict=True):
            seat.length += 1
            if isinstance(each, Emitted):
                self._draw(seat, each)
        return emitted

    def free(self, slot: int) -> None:
        """Forget a slot's request and zero what it wrote."""
        with told_if_lost(self.model.device), torch.inference_mode():
            self._seats.free(slot)

    def status(self) -> dict[str, Any]:
        """Return the memory of the KV rows, graphs, and what the device has in use."""
        counters: dict[str, Any] = {"kv_bytes": self.cache.nbytes}
        if isinstance(self._steps, Fixed):
            counters["graphs"] = self._steps.captured
        if self.model.device.type == "cuda":
            counters["device_bytes"] = torch.cuda.memory_allocated()
            counters["device_bytes_reserved"] = torch.cuda.memory_reserved()
        return counters

    def _held(self, prompt: Prompt) -> Held:
        return Held(list(prompt.input_ids), pictures_of(self._family, prompt))

    def _prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        seat = self._seats[slot]
        # Counted as filled before the pass, so that a failing one is zeroed, too.
        seat.length = stop
        hidden = self._passes.chunk(seat.row, prompt, start, stop)
        if stop < len(prompt.input_ids):
            return None
        made = self._passes.head(hidden)
        ruled = self._ruled.first(slot, prompt.input_ids, made)
        (emitted,) = choose(ruled, [seat.sampler], made)
        if isinstance(emitted, Exception):
            raise emitted
        seat.delta = self._family.delta(prompt)
        self._draw(seat, emitted)
        return emitted

    def _draw(self, seat: Seat, emitted: Emitted) -> None:
        assert emitted.token is not None
        seat.token = emitted.token
        if seat.held is not None:
            seat.held.ids.append(emitted.token)
