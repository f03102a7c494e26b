"""The forward passes of a model of transformers over the rows of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lifecycle_engine.core.model_runner import Prompt
from lifecycle_engine.model.cuda_graphs import StepInputs, StepShape
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
    join_features,
    layer_types,
    logits_transform,
)
from lifecycle_engine.model.kv_cache import (
    BatchWindow,
    PrefillWindow,
    SlotCache,
    Together,
    alone,
    cache_parameter,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prompt, and where it goes.

    Attributes:
        row: Its row of the cache.
        start: Its first position there.
        ids: Its tokens.
        positions: Their rotary positions: ``(axes, tokens)`` or ``(tokens,)``.
    """

    row: int
    start: int
    ids: Sequence[int]
    positions: torch.Tensor

    @property
    def stop(self) -> int:
        """The position after its last one."""
        return self.start + len(self.ids)

    @staticmethod
    def pack(chunks: Sequence[Chunk]) -> list[Any]:
        """Return the numbers of chunks, and tensors of them."""
        numbers = [(each.row, each.start, len(each.ids)) for each in chunks]
        ids = [torch.tensor(each.ids) for each in chunks]
        positions = torch.cat([each.positions for each in chunks], dim=-1)
        return [len(chunks), torch.tensor(numbers), *ids, positions]

    @staticmethod
    def unpack(numbers: Sequence[int]) -> list[Chunk]:
        """Return the chunks of `pack`, whose tensors are flat now."""
        count, rest = numbers[0], torch.tensor(numbers[1:])
        rows, starts, lengths = rest[: 3 * count].view(count, 3).T.tolist()
        total = sum(lengths)
        ids, positions = rest[3 * count :].split([total, len(rest) - 3 * count - total])
        if len(positions) > total:
            positions = positions.view(-1, total)  # with several axes
        return [
            Chunk(row, start, of.tolist(), at)
            for row, start, of, at in zip(
                rows,
                starts,
                ids.split(lengths),
                positions.split(lengths, -1),
                strict=True,
            )
        ]


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

    def prefill(self, parts: Sequence[tuple[int, Prompt, int, int]]) -> torch.Tensor:
        """Run chunks of prompts; return the last hidden state of each, ``(n, hidden)``.

        When it returns or raises, nothing reads the prompts' tensors any more.

        Args:
            parts: Row, prompt, start and stop of each chunk.
        """
        try:
            hidden = self._prefill(parts)
        finally:
            self._copies.wait()
        # Otherwise the chunk's time would be measured as the next decode step's.
        self._device.record_event().synchronize()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(n, vocab)`` after hidden states."""
        with self._together("logits", ()):
            return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits_transform(self._model.lm_head(hidden))

    def decode(self, inputs: StepInputs) -> torch.Tensor:
        """Run a decode step, without synchronising with the device."""
        shape = *inputs.ids.shape, inputs.stop
        with self._together("decode", (*shape, inputs.table)):
            return self._decode(inputs)

    def _decode(self, inputs: StepInputs) -> torch.Tensor:
        self._cache.window = BatchWindow(
            inputs.rows, inputs.positions, inputs.stop, slice(inputs.ids.shape[0])
        )
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

    def _prefill(self, parts: Sequence[tuple[int, Prompt, int, int]]) -> torch.Tensor:
        chunks, images = [], []
        for row, prompt, start, stop in parts:
            positions = self._family.positions(prompt, start, stop)
            chunks.append(Chunk(row, start, prompt.input_ids[start:stop], positions))
            found = chunk_image_features(
                self._family, self._model, prompt, start, stop, self._copies.start
            )
            images += [] if found is None else [found]
        features = join_features(images) if images else None
        with self._together("prefill", Chunk.pack(chunks), features):
            return self.run(chunks, features)

    def run(self, chunks: Sequence[Chunk], images: EncodedImage | None) -> torch.Tensor:
        """Run chunks; return the last hidden state of each, ``(n, hidden)``.

        Args:
            chunks: One for each row.
            images: Features of all their image tokens, in order.
        """
        device = self._model.device
        if len(chunks) == 1:
            (chunk,) = chunks
            ids, positions = small_tensor([chunk.ids], device), chunk.positions
            mask = self._masks.prefill(chunk.start, chunk.stop, device)
            self._cache.window = PrefillWindow(chunk.row, chunk.start, chunk.stop)
            positions = positions[..., None, :]
        else:
            inputs, positions = self._padded(chunks)
            ids, mask = inputs.ids, self._masks.decode(inputs)
            lanes = small_tensor([chunk.row for chunk in chunks], device)
            self._cache.window = BatchWindow(
                inputs.rows, inputs.positions, inputs.stop, lanes
            )
        embeds, extra = self._embed(ids, images)
        output = self._text(
            inputs_embeds=embeds,
            position_ids=positions.to(device),
            attention_mask=mask,
            use_cache=True,
            **self._cache_argument,
            **extra,
        )
        last = [(lane, len(chunk.ids) - 1) for lane, chunk in enumerate(chunks)]
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[tuple(small_tensor(last, device).T)]

    def _padded(self, chunks: Sequence[Chunk]) -> tuple[StepInputs, torch.Tensor]:
        """Return the inputs of a pass over chunks, and their rotary positions."""
        longest = max(len(chunk.ids) for chunk in chunks)
        stop = max(chunk.stop for chunk in chunks)
        reserved = self._cache.reserved
        # Any token but that of images, whose features would be too few.
        padding = (int(self._family.image_token == 0), reserved, 0, 0)
        shape = (*chunks[0].positions.shape[:-1], len(chunks), longest)
        rotary = torch.zeros(shape, dtype=torch.long)
        columns: list[tuple[int, int, int, int]] = []
        for lane, chunk in enumerate(chunks):
            count = len(chunk.ids)
            rotary[..., lane, :count] = chunk.positions
            columns += [
                (token, chunk.row, chunk.start + at, 0)
                for at, token in enumerate(chunk.ids)
            ]
            columns += [padding] * (longest - count)
        inputs = StepInputs(
            StepShape(len(chunks), longest, stop),
            reserved=reserved,
            device=self._model.device,
        )
        inputs.load(list(zip(*columns, strict=True)))
        return inputs, rotary

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
