"""The forward passes of a model of transformers over the rows of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lifecycle_engine.core.model_runner import Prompt
from lifecycle_engine.model.cuda_graphs import StepInputs
from lifecycle_engine.model.device_copies import (
    PendingCopies,
    TorchDevice,
    small_tensor,
)
from lifecycle_engine.model.families import (
    FULL,
    SLIDING,
    EncodedImage,
    ModelFamily,
    chunk_image_features,
    layer_types,
    logits_transform,
)
from lifecycle_engine.model.kv_cache import (
    DecodeWindow,
    PrefillWindow,
    SlotCache,
    Together,
    alone,
    cache_parameter,
)


class ForwardPass:
    """Runs the forward passes of a transformers model over the rows of a cache.

    Args:
        model: The model.
        family: The model's family.
        cache: The rows that the passes read and write.
        together: Has the other ranks of a tensor parallel model run the same passes.
    """

    def __init__(
        self,
        model: Any,
        family: ModelFamily,
        cache: SlotCache,
        together: Together = alone,
    ) -> None:
        self._model, self._family, self._cache = model, family, cache
        self._together = together
        self._text = getattr(model.model, "language_model", model.model)
        self._masks = AttentionMasks(model.config.get_text_config())
        self._logits_transform = logits_transform(model.config)
        self._cache_argument = {cache_parameter(self._text): cache}
        self._device = TorchDevice(model.device)
        self._copies = PendingCopies(self._device)

    def prefill(self, row: int, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Run a chunk of a prompt into a row; return its hidden states.

        When it returns or raises, nothing reads the prompt's tensors any more.
        """
        try:
            hidden = self._prefill(row, prompt, start, stop)
        finally:
            self._copies.wait()
        # Otherwise the chunk's time would be measured as the next decode step's.
        self._device.record_event().synchronize()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(rows, vocab)`` after the last token of each row."""
        with self._together("logits", ()):
            return self._logits(hidden[:, -1])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits_transform(self._model.lm_head(hidden))

    def decode(self, inputs: StepInputs) -> torch.Tensor:
        """Run a decode step, without synchronising with the device."""
        shape = *inputs.ids.shape, inputs.stop
        with self._together("decode", (*shape, inputs.table)):
            return self._decode(inputs)

    def _decode(self, inputs: StepInputs) -> torch.Tensor:
        self._cache.window = DecodeWindow(inputs.rows, inputs.positions, inputs.stop)
        positions = inputs.rotary
        if self._family.axes:
            positions = positions.expand(self._family.axes, -1, -1)
        output = self._text(
            input_ids=inputs.ids,
            position_ids=positions,
            attention_mask=self._masks.decode(inputs),
            use_cache=True,
            **self._cache_argument,
        )
        return self._logits(output.last_hidden_state)

    def _prefill(self, row: int, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        ids = prompt.input_ids[start:stop]
        positions = self._family.positions(prompt, start, stop)
        images = chunk_image_features(
            self._family, self._model, prompt, start, stop, self._copies.start
        )
        window = PrefillWindow(row, start, stop)
        numbers = (row, start, stop, torch.tensor(ids), positions)
        with self._together("prefill", numbers, images):
            return self.chunk(window, ids, positions, images)

    def chunk(
        self,
        window: PrefillWindow,
        ids: Sequence[int],
        positions: torch.Tensor,
        images: EncodedImage | None,
    ) -> torch.Tensor:
        """Run a chunk of a prompt into a row; return its hidden states.

        Args:
            window: The row, and the positions that the chunk fills.
            ids: Its tokens.
            positions: Their rotary positions: ``(axes, tokens)`` or ``(tokens,)``.
            images: Features of its image tokens.
        """
        device = self._model.device
        embeds, extra = self._embed(small_tensor([ids], device), images)
        self._cache.window = window
        output = self._text(
            inputs_embeds=embeds,
            position_ids=positions.to(device)[..., None, :],
            attention_mask=self._masks.prefill(window.start, window.stop, device),
            use_cache=True,
            **self._cache_argument,
            **extra,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _embed(
        self, ids: torch.Tensor, images: EncodedImage | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Embed a chunk, with image features in place of the image tokens."""
        embeds = self._text.get_input_embeddings()(ids)
        if images is None:
            return embeds, {}
        mask = ids == self._family.image_token
        embeds[mask] = images.features.to(embeds.dtype)
        if not images.deep:
            return embeds, {}
        return embeds, {
            "visual_pos_masks": mask,
            "deepstack_visual_embeds": images.deep,
        }


class AttentionMasks:
    """Builds the ``attention_mask`` of forward passes.

    A cache row holds every position even in layers with a sliding window, so that rows
    are packed, cached and resumed alike in all layers; a window saves no memory.

    Args:
        text: Config of a language model that passed `check_attention`.
    """

    def __init__(self, text: Any) -> None:
        kinds = set(layer_types(text))
        self._window: int | None = text.sliding_window if SLIDING in kinds else None
        self._by_layer = bool(getattr(text, "layer_types", None))

    def prefill(self, start: int, stop: int, device: torch.device) -> Any:
        """Mask of positions ``start .. stop - 1`` of a row; ``None`` is causal."""
        at = torch.arange(start, stop, device=device)[:, None]
        visible = torch.arange(stop, device=device)[None]
        full = (visible <= at)[None, None] if start else None
        if self._window is None:
            return full
        local = (visible <= at) & (visible > at - self._window)
        return self._for_layers(full, local[None, None])

    def decode(self, inputs: StepInputs) -> Any:
        """Mask of the tokens of each lane; does not synchronise with the device."""
        if self._window is None:
            return inputs.mask
        visible = torch.arange(inputs.stop, device=inputs.positions.device)
        local = visible > inputs.positions[..., None] - self._window
        return self._for_layers(inputs.mask, inputs.mask & local[:, None])

    def _for_layers(self, full: Any, local: Any) -> Any:
        # A model with several types of layers looks its mask up by type.
        return {FULL: full, SLIDING: local} if self._by_layer else local
