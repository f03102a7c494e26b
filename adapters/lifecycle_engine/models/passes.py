"""The forward passes of a loaded model: a chunk of a prompt, a step of a batch."""

from __future__ import annotations

from typing import Any

import torch

from lifecycle_engine.runner import Prompt

from .attention import shared_heads
from .families import logits_of
from .graphs import Inputs
from .kv import Chunk, SlotCache, Step
from .masks import Masks
from .uploads import TorchDevice, Uploads, small
from .vision import Family, images_of_chunk


class Passes:
    """Runs a model of transformers over the rows of a cache.

    Args:
        model: The model.
        family: What differs between models of its kind.
        cache: The rows that are written and read.
    """

    def __init__(self, model: Any, family: Family, cache: SlotCache) -> None:
        self._model, self._family, self._cache = model, family, cache
        self._text = getattr(model.model, "language_model", model.model)
        self._masks = Masks(model.config.get_text_config())
        self._logits = logits_of(model.config)
        self._shared_heads = shared_heads(self._text)
        self._device = TorchDevice(model.device)
        self._uploads = Uploads(self._device)

    def chunk(self, row: int, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Read a chunk of a prompt into a row; return its hidden states.

        When it returns or raises, nothing reads the prompt's tensors any more.
        """
        try:
            hidden = self._chunk(row, prompt, start, stop)
        finally:
            self._uploads.finish()
        # What a chunk takes would be told as the next decode step's otherwise.
        self._device.mark().synchronize()
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(rows, vocab)`` behind the last token of each row."""
        return self._logits(self._model.lm_head(hidden[:, -1]))

    def step(self, inputs: Inputs) -> torch.Tensor:
        """Run a decode step; nothing in it may wait for the device."""
        self._cache.window = Step(inputs.rows, inputs.positions, inputs.stop)
        positions = inputs.rotary[:, None]
        if self._family.axes:
            positions = positions.expand(self._family.axes, -1, -1)
        with self._shared_heads():
            output = self._text(
                input_ids=inputs.ids[:, None],
                position_ids=positions,
                attention_mask=self._masks.step(inputs),
                past_key_values=self._cache,
                use_cache=True,
            )
        return self.head(output.last_hidden_state)

    def _chunk(self, row: int, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        device = self._model.device
        ids = small([prompt.input_ids[start:stop]], device)
        embeds, extra = self._embed(ids, prompt, start, stop)
        positions = self._family.positions(prompt, start, stop).to(device)
        self._cache.window = Chunk(row, start, stop)
        output = self._text(
            inputs_embeds=embeds,
            position_ids=positions[..., None, :],
            attention_mask=self._masks.chunk(start, stop, device),
            past_key_values=self._cache,
            use_cache=True,
            **extra,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _embed(
        self, ids: torch.Tensor, prompt: Prompt, start: int, stop: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Embed a chunk, images in the place of their tokens."""
        family = self._family
        embeds = self._text.get_input_embeddings()(ids)
        images = images_of_chunk(
            family, self._model, prompt, start, stop, self._uploads.begin
        )
        if images is None:
            return embeds, {}
        places = ids == family.image_token
        embeds[places] = images.features.to(embeds.dtype)
        if not images.deep:
            return embeds, {}
        return embeds, {
            "visual_pos_masks": places,
            "deepstack_visual_embeds": images.deep,
        }
