"""Real checkpoints behind the runner protocol.

Model code and loading are transformers'. Ours: the KV rows, per-request
positions and one batched step for whichever requests are running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ._hf import hf, quiet
from .kv import SlotCache
from .prompts import VisionShape, check_images
from .runner import DeviceLost, Prompt
from .sampling import Sampler, choose
from .uploads import TorchDevice, Uploads

# The one thing of the multimodal inputs that decode still needs.
_DELTAS = "mrope.position_deltas"


@dataclass(slots=True)
class _Lane:
    """What is remembered of the request in a slot.

    Attributes:
        length: KV positions filled.
        kept: The request's tensors after the strip: its position deltas.
        sampler: Its source of tokens.
    """

    length: int
    kept: dict[str, Any]
    sampler: Sampler


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
        max_length: int,
        buckets: Sequence[int] = (),
    ) -> None:
        """Allocate the KV rows for a loaded model.

        Args:
            model: In eval mode on its device, with ``sdpa`` attention.
            slots: Requests that can hold KV at a time.
            max_length: Positions of each slot.
            buckets: Batch sizes that a decode step is padded up to with lanes on
                the reserved row; empty pads nothing.
        """
        config = model.config.get_text_config()
        limit = config.max_position_embeddings
        if not 2 <= max_length <= limit:
            raise ValueError(
                f"max_length is {max_length}; the model takes 2 to {limit}"
            )
        self.model = model
        self.slots, self.max_length = slots, max_length
        self.vocab_size: int = config.vocab_size
        self.keep: Sequence[str] = (_DELTAS,)
        self._buckets = sorted(buckets)
        self._shape = VisionShape.of(model.config)
        self._lanes: dict[int, _Lane] = {}
        self._uploads = Uploads(TorchDevice(model.device))
        self.cache = SlotCache(
            layers=config.num_hidden_layers,
            slots=slots,
            heads=config.num_key_value_heads,
            max_length=max_length,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            dtype=model.dtype,
            device=model.device,
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
        max_length: int = 4096,
        buckets: Sequence[int] = (),
    ) -> TransformersRunner:
        """Load a checkpoint folder through `from_pretrained`, never a network.

        Args:
            checkpoint: A local folder.
            device: ``"cpu"`` or ``"cuda"``.
            dtype: Name of a torch dtype, or ``"auto"`` for the checkpoint's own.
            threads: CPU threads of the whole process; ``None`` leaves torch's.
            slots: Requests that can hold KV at a time.
            max_length: Positions of each slot.
            buckets: See `__init__`.

        Raises:
            OSError: No checkpoint there.
            ValueError: No such device, or sizes that the model does not take.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device is cuda, but torch {torch.__version__} sees none; use cpu"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        with quiet():
            model = hf("AutoModelForImageTextToText").from_pretrained(
                str(checkpoint),
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation="sdpa",
                local_files_only=True,
            )
        model = model.to(device).eval()
        return cls(model, slots=slots, max_length=max_length, buckets=buckets)

    def check(self, prompt: Prompt) -> None:
        """Refuse image tensors that do not fit the prompt; see `check_images`."""
        check_images(self._shape, prompt.input_ids, prompt.tensors)

    def prefill(self, slot: int, prompt: Prompt) -> int:
        """Run the whole prompt and its images into a slot; return the first token."""
        lane = _Lane(0, prompt.tensors, Sampler(prompt.temperature, prompt.seed))
        self._lanes[slot] = lane
        try:
            with torch.inference_mode():
                # Counted as filled before the pass, so that a failing one is
                # zeroed by `free` as well.
                lane.length = len(prompt.input_ids)
                try:
                    logits = self._prefill(slot, prompt)
                finally:
                    # From here on the caller may drop the prompt's tensors.
                    self._uploads.finish()
                if not bool(torch.isfinite(logits).all()):
                    raise FloatingPointError("the prompt's logits are not finite")
                return choose(logits, [lane.sampler])[0]
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Run one token of each slot; return the next ones."""
        lanes = [self._lanes[slot] for slot in slots]
        try:
            with torch.inference_mode():
                logits = self._decode(slots, tokens, lanes)
                chosen = choose(logits, [lane.sampler for lane in lanes])
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise
        for lane in lanes:
            lane.length += 1
        return chosen

    def free(self, slot: int) -> None:
        """Forget a slot's request and zero what it wrote."""
        lane = self._lanes.pop(slot, None)
        if lane is not None:
            try:
                # One more: a step that failed half-way has written it already.
                self.cache.clear(slot, min(lane.length + 1, self.max_length))
            except RuntimeError as error:
                self._raise_if_lost(error)
                raise

    def _prefill(self, slot: int, prompt: Prompt) -> torch.Tensor:
        device = self.model.device
        length = len(prompt.input_ids)
        ids = torch.tensor([prompt.input_ids], device=device)
        images = {
            name: self._uploads.begin(prompt.tensors[name])
            for name in ("pixel_values", "image_grid_thw")
            if name in prompt.tensors
        }
        positions, delta = self._positions(ids, images.get("image_grid_thw"))
        prompt.tensors["mrope"] = {"position_deltas": delta}
        self.cache.prefill_window(slot, 0, length)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **images,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _positions(
        self, ids: torch.Tensor, grids: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """Rotary positions ``(3, 1, tokens)`` and how far decode is behind them.

        Asked of the model's own function but passed in and kept here: left to
        itself the model stores the deltas on the module, where the request that
        came last decides for all.
        """
        if grids is None:
            plain = torch.arange(ids.shape[1], device=ids.device)
            return plain.view(1, 1, -1).expand(3, 1, -1), 0
        types = (ids == self.model.config.image_token_id).int()
        positions, deltas = self.model.model.get_rope_index(
            ids, mm_token_type_ids=types, image_grid_thw=grids
        )
        return positions, int(deltas.item())

    def _decode(
        self, slots: Sequence[int], tokens: Sequence[int], lanes: Sequence[_Lane]
    ) -> torch.Tensor:
        device = self.model.device
        padding = self._bucket(len(slots)) - len(slots)
        rows = torch.tensor([*slots, *[self.cache.reserved] * padding], device=device)
        lengths = [lane.length for lane in lanes] + [0] * padding
        deltas = [lane.kept["mrope"]["position_deltas"] for lane in lanes]
        ids = torch.tensor([*tokens, *[0] * padding], device=device)
        at = torch.tensor(lengths, device=device)
        rotary = at + torch.tensor(deltas + [0] * padding, device=device)
        stop = max(lengths) + 1
        seen = torch.arange(stop, device=device)[None] <= at[:, None]
        self.cache.decode_window(rows, at, stop)
        output = self.model(
            input_ids=ids[:, None],
            position_ids=rotary.view(1, -1, 1).expand(3, -1, 1),
            attention_mask=seen[:, None, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _bucket(self, lanes: int) -> int:
        return next((size for size in self._buckets if size >= lanes), lanes)

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
