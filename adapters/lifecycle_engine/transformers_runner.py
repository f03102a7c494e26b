"""Real checkpoints behind the runner protocol.

Model code and loading are transformers'. Ours: the KV rows, per-request
positions, and one batched step for whichever requests are running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .attention import shared_heads
from .families import family_of, load_model
from .graphs import Eager, Fixed, GraphMode, Inputs, Lane
from .kv import Chunk, SlotCache, Step
from .runner import DeviceLost, Emitted, Prompt
from .sampling import Sampler, choose
from .uploads import TorchDevice, Uploads
from .vision import images_of_chunk, needed_until

_MAX_LENGTH = 8192


@dataclass(slots=True)
class _Seat:
    """What is remembered of the request in a slot.

    Attributes:
        row: Of the cache. It changes when the rows of a batch are packed.
        sampler: Its source of tokens.
        length: KV positions filled.
        token: The last one drawn; negative until the prompt is read.
        delta: Of its rotary positions while decoding.
    """

    row: int
    sampler: Sampler
    length: int = 0
    token: int = -1
    delta: int = 0


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
        max_length: int | None = None,
        graphs: GraphMode = "off",
        buckets: Sequence[int] = (),
    ) -> None:
        """Allocate the KV rows for a loaded model.

        Args:
            model: In eval mode on its device, with ``sdpa`` attention.
            slots: Requests that can hold KV at a time.
            max_length: Positions of each slot; ``None`` is what the model takes, up
                to 8192.
            graphs: How decode steps run: ``"off"`` as they come, ``"on"`` as CUDA
                graphs of a few fixed shapes, ``"fake"`` with the same shapes and
                memory but without capture.
            buckets: Batch sizes of the graphs; none are the powers of two.

        Raises:
            ValueError: A family or a length that cannot run, or graphs without
                CUDA.
        """
        config = model.config.get_text_config()
        limit = config.max_position_embeddings
        max_length = max_length or min(limit, _MAX_LENGTH)
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
        self.keep = self._family.keep
        self._text = getattr(model.model, "language_model", model.model)
        self._shared_heads = shared_heads(self._text)
        self._seats: dict[int, _Seat] = {}
        self._uploads = Uploads(TorchDevice(model.device))
        self.cache = SlotCache.of(model, slots=slots, max_length=max_length)
        self._steps: Eager | Fixed
        if graphs == "off":
            self._steps = Eager(self._forward, slots=slots, device=model.device)
        else:
            self._steps = Fixed(
                self._forward,
                slots=slots,
                max_length=max_length,
                device=model.device,
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
            max_length=max_length,
            graphs=graphs,
            buckets=buckets,
        )
        if graphs == "on":
            runner.capture()
        return runner

    def capture(self) -> None:
        """Make the graphs of all shapes, so that no request waits for one."""
        if isinstance(self._steps, Fixed):
            with torch.inference_mode():
                self._steps.prepare()

    def check(self, prompt: Prompt) -> None:
        """Refuse image tensors that do not fit the prompt or the model."""
        self._family.check(prompt)

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return the position behind the last image token."""
        return needed_until(self._family, prompt)

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Run a chunk of the prompt and its images; the last one draws a token."""
        try:
            with torch.inference_mode():
                if not start:
                    self.free(slot)
                    self._seats[slot] = self._seat(prompt)
                    self._family.begin(self.model, prompt)
                try:
                    return self._prefill(self._seats[slot], prompt, start, stop)
                finally:
                    self._uploads.finish()  # now the tensors may be dropped
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        """Run one token of each slot; return the next ones."""
        seats = [self._seats[slot] for slot in slots]
        try:
            with torch.inference_mode():
                width = self._pack(seats)
                lanes = [
                    Lane(seat.row, seat.token, seat.length, seat.delta)
                    for seat in seats
                ]
                logits = self._steps.run(lanes, width)
                picked = logits[[seat.row for seat in seats]]
                emitted = choose(picked, [seat.sampler for seat in seats])
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise
        for seat, made in zip(seats, emitted, strict=True):
            assert made.token is not None
            seat.length, seat.token = seat.length + 1, made.token
        return emitted

    def free(self, slot: int) -> None:
        """Forget a slot's request and zero what it wrote."""
        seat = self._seats.pop(slot, None)
        if seat is not None:
            try:
                # One more: a step that failed half-way has written it already.
                self.cache.clear(seat.row, min(seat.length + 1, self.max_length))
            except RuntimeError as error:
                self._raise_if_lost(error)
                raise

    def status(self) -> dict[str, Any]:
        """Return the memory of the KV rows, and of the device where it is CUDA."""
        counters: dict[str, Any] = {"kv_bytes": self.cache.nbytes}
        if self.model.device.type == "cuda":
            counters["device_bytes"] = torch.cuda.memory_allocated()
            counters["device_bytes_reserved"] = torch.cuda.memory_reserved()
        return counters

    def _seat(self, prompt: Prompt) -> _Seat:
        taken = {seat.row for seat in self._seats.values()}
        row = next(row for row in range(self.slots) if row not in taken)
        return _Seat(row, Sampler(prompt.sampling))

    def _prefill(
        self, seat: _Seat, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        # Counted as filled before the pass, so that a failing one is zeroed, too.
        seat.length = stop
        hidden = self._chunk(seat.row, prompt, start, stop)
        if stop < len(prompt.input_ids):
            return None
        logits = self.model.lm_head(hidden[:, -1])
        if not bool(torch.isfinite(logits).all()):
            raise FloatingPointError("the prompt's logits are not finite")
        (emitted,) = choose(logits, [seat.sampler])
        assert emitted.token is not None
        seat.token, seat.delta = emitted.token, self._family.delta(prompt)
        return emitted

    def _chunk(self, row: int, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        device, family = self.model.device, self._family
        ids = torch.tensor([prompt.input_ids[start:stop]], device=device)
        embeds = self._text.get_input_embeddings()(ids)
        extra: dict[str, Any] = {}
        images = images_of_chunk(
            family, self.model, prompt, start, stop, self._uploads.begin
        )
        if images is not None:
            places = ids == family.image_token
            embeds[places] = images.features.to(embeds.dtype)
            if images.deep:
                extra["visual_pos_masks"] = places
                extra["deepstack_visual_embeds"] = images.deep
        del images
        mask = None
        if start:
            at = torch.arange(start, stop, device=device)
            mask = torch.arange(stop, device=device)[None] <= at[:, None]
            mask = mask[None, None]
        positions = family.positions(prompt, start, stop).to(device)
        self.cache.window = Chunk(row, start, stop)
        output = self._text(
            inputs_embeds=embeds,
            position_ids=positions[..., None, :],
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **extra,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        """One decode step; nothing in it may wait for the device."""
        self.cache.window = Step(inputs.rows, inputs.positions, inputs.stop)
        positions = inputs.rotary[:, None]
        if self._family.axes:
            positions = positions.expand(self._family.axes, -1, -1)
        with self._shared_heads():
            output = self._text(
                input_ids=inputs.ids[:, None],
                position_ids=positions,
                attention_mask=inputs.mask,
                past_key_values=self.cache,
                use_cache=True,
            )
        logits: torch.Tensor = self.model.lm_head(output.last_hidden_state[:, -1])
        return logits

    def _pack(self, seats: Sequence[_Seat]) -> int:
        """Bring a batch's rows together at the front; return its width.

        Where a prompt that is being read sits among them it stays, and the batch
        is as much wider until it is read.
        """
        width = self._steps.width(len(seats))
        taken = {seat.row for seat in self._seats.values()}
        free = (row for row in range(width) if row not in taken)
        for seat in seats:
            if seat.row >= width and (to := next(free, None)) is not None:
                self.cache.move(seat.row, to, seat.length)
                seat.row = to
        return self._steps.width(max(seat.row for seat in seats) + 1)

    def _raise_if_lost(self, error: RuntimeError) -> None:
        """Tell a device that is gone from an error that the next call survives."""
        if self.model.device.type != "cuda" or isinstance(
            error, torch.OutOfMemoryError
        ):
            return
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.model.device).item()
        except RuntimeError:
            raise DeviceLost("a CUDA error that stays; the process must end") from None
