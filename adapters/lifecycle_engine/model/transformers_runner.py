"""`TransformersRunner`: runs checkpoints of transformers behind the `Runner` protocol.

Model code and loading are those of transformers. This package adds the KV rows, the
positions of each request, and one batched decode step for all running requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lifecycle_engine.core.model_runner import Emitted, Prompt, Sampling
from lifecycle_engine.core.slots import PrefixContents
from lifecycle_engine.model.attention import AttentionMasks
from lifecycle_engine.model.cuda_graphs import (
    EagerSteps,
    FixedShapeSteps,
    GraphMode,
    Lane,
    StepInputs,
)
from lifecycle_engine.model.device_copies import (
    PendingCopies,
    TorchDevice,
    detect_device_loss,
    small_tensor,
)
from lifecycle_engine.model.families import (
    EncodedImage,
    ModelFamily,
    chunk_image_features,
    family_of,
    freeze_rope_frequencies,
    image_spans,
    logits_transform,
    max_positions,
    tensors_needed_until,
)
from lifecycle_engine.model.kv_cache import (
    WHOLE,
    BatchRows,
    DecodeWindow,
    Part,
    PrefillWindow,
    RowState,
    SlotCache,
    Together,
    alone,
    cache_parameter,
)
from lifecycle_engine.model.loader import load_model
from lifecycle_engine.model.sampler import (
    GenerationRules,
    LogitsProcessors,
    Sampler,
    sample_tokens,
)

# Default limit of the positions of a slot.
MAX_LENGTH = 8192


class TransformersRunner:
    """A vision-language (or text) model of transformers on one device.

    Attributes:
        model: The loaded model.
        cache: Its KV rows.
        forward: Its forward passes.
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
        part: Part = WHOLE,
    ) -> None:
        """Allocate the KV rows for a loaded model.

        Args:
            model: In eval mode on its device, with ``sdpa`` attention.
            slots: Number of requests that can hold KV at once.
            max_batch: Maximum number of them that run at once, for which graphs are
                captured; ``None`` is all. The scheduler's should not exceed it.
            max_length: Positions of each slot; ``None`` is the model's maximum, up to
                8192.
            graphs: How decode steps run: ``"off"`` eagerly, ``"on"`` as CUDA graphs of
                a few fixed shapes, ``"fake"`` with the same shapes and memory but
                without capture.
            buckets: Batch sizes of the graphs; empty for the powers of two.
            part: What this process has of the model.

        Raises:
            ValueError: An unsupported family, generation config or length, or graphs
                without CUDA.
        """
        self.model, self.slots = model, slots
        self.max_length = _slot_length(model, max_length)
        if graphs == "on" and model.device.type != "cuda":
            raise ValueError(f"graphs is on, the device {model.device}; they need cuda")
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._family = family_of(model.config)
        freeze_rope_frequencies(model)
        self.keep = self._family.keep
        self.cache = SlotCache.for_model(
            model, slots=slots, max_length=self.max_length, part=part
        )
        self._processors = LogitsProcessors(
            GenerationRules.from_config(model.generation_config),
            slots=slots,
            vocab_size=self.vocab_size,
            device=model.device,
        )
        self.forward = ForwardPass(model, self._family, self.cache, part.together)
        self._rows = BatchRows(self.cache, slots=slots, max_length=self.max_length)
        self._steps = self._make_steps(graphs, max_batch, buckets)

    def _make_steps(
        self, graphs: GraphMode, max_batch: int | None, buckets: Sequence[int]
    ) -> EagerSteps | FixedShapeSteps:
        forward, device = self.forward.decode, self.model.device
        if graphs == "off":
            return EagerSteps(forward, slots=self.slots, device=device)
        return FixedShapeSteps(
            forward,
            slots=self.slots,
            max_length=self.max_length,
            device=device,
            max_batch=max_batch,
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
        """Load a checkpoint folder with `from_pretrained`, without network access.

        Args:
            checkpoint: A local folder.
            device: ``"cpu"`` or ``"cuda"``.
            dtype: Name of a torch dtype, or ``"auto"`` for the checkpoint's own.
            threads: CPU threads of the whole process; ``None`` is torch's default.
            slots: Number of requests that can hold KV at once.
            max_batch: See `__init__`.
            max_length: See `__init__`.
            graphs: See `__init__`; all shapes are captured before this returns.
            buckets: See `__init__`.

        Raises:
            OSError: The folder holds no checkpoint.
            ValueError: No such device, or an unsupported model or size.
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
        runner.self_test()
        return runner

    def self_test(self) -> None:
        """Prefill one token and generate two, to find a broken model at start.

        Raises:
            ValueError: The model does not run.
        """
        try:
            self.prefill(0, Prompt([0], {}, Sampling()), 0, 1)
            (output,) = self.decode([0])
            if isinstance(output, Exception):
                raise output
            self.free(0)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the model does not run: {type(error).__name__}: {first}"
            ) from error

    def capture(self) -> None:
        """Capture the graphs of all shapes, so that no request waits for one."""
        if isinstance(self._steps, FixedShapeSteps):
            with detect_device_loss(self.model.device), torch.inference_mode():
                self._steps.prepare()

    def check(self, prompt: Prompt) -> None:
        """Reject image tensors that do not fit the prompt or the model."""
        self._family.check(prompt)

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return the position after the last image token."""
        return tensors_needed_until(self._family, prompt)

    def resume(self, slot: int, prompt: Prompt) -> int:
        """Keep the prefix that a slot shares with a new prompt; return its length."""
        with detect_device_loss(self.model.device), torch.inference_mode():
            self._family.prepare_positions(self.model, prompt)
            contents = self._contents(prompt)
            return self._rows.resume(slot, Sampler(prompt.sampling), contents)

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Run a chunk of the prompt and its images; the last chunk samples a token."""
        with detect_device_loss(self.model.device), torch.inference_mode():
            if not start:
                contents = self._contents(prompt) if prompt.session else None
                self._rows.assign(slot, Sampler(prompt.sampling), contents)
                self._family.prepare_positions(self.model, prompt)
            return self._prefill(slot, prompt, start, stop)

    def decode(self, slots: Sequence[int]) -> list[Emitted | Exception]:
        """Run the last token of each slot; return the next tokens."""
        states = [self._rows[slot] for slot in slots]
        with detect_device_loss(self.model.device), torch.inference_mode():
            width = self._rows.pack(slots, self._steps.width)
            lanes = [
                Lane(state.row, state.token, state.length, state.delta)
                for state in states
            ]
            rows = small_tensor([state.row for state in states], self.model.device)
            logits = self._steps.run(lanes, width)[rows]
            processed = self._processors.next(
                slots,
                [state.token for state in states],
                [state.length + 1 for state in states],
                logits,
            )
            samplers = [state.sampler for state in states]
            emitted = sample_tokens(processed, samplers, logits)
        for state, each in zip(states, emitted, strict=True):
            state.length += 1
            if isinstance(each, Emitted):
                self._record(state, each)
        return emitted

    def free(self, slot: int) -> None:
        """Discard a slot's state and zero its row."""
        with detect_device_loss(self.model.device), torch.inference_mode():
            self._rows.free(slot)

    def status(self) -> dict[str, Any]:
        """Return the bytes of the KV rows, the number of graphs and device memory."""
        counters: dict[str, Any] = {"kv_bytes": self.cache.nbytes}
        if isinstance(self._steps, FixedShapeSteps):
            counters["graphs"] = self._steps.captured
        if self.model.device.type == "cuda":
            counters["device_bytes"] = torch.cuda.memory_allocated()
            counters["device_bytes_reserved"] = torch.cuda.memory_reserved()
        return counters

    def _contents(self, prompt: Prompt) -> PrefixContents:
        images = image_spans(self._family, prompt)
        return PrefixContents(list(prompt.input_ids), images)

    def _prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        state = self._rows[slot]
        # Before the pass, so that the row is zeroed even if the pass fails.
        state.length = stop
        hidden = self.forward.prefill(state.row, prompt, start, stop)
        if stop < len(prompt.input_ids):
            return None
        logits = self.forward.logits(hidden)
        processed = self._processors.first(slot, prompt.input_ids, logits)
        (emitted,) = sample_tokens(processed, [state.sampler], logits)
        if isinstance(emitted, Exception):
            raise emitted
        state.delta = self._family.delta(prompt)
        self._record(state, emitted)
        return emitted

    def _record(self, state: RowState, emitted: Emitted) -> None:
        assert emitted.token is not None
        state.token = emitted.token
        if state.contents is not None:
            state.contents.ids.append(emitted.token)


def _slot_length(model: Any, max_length: int | None) -> int:
    limit = max_positions(model.config.get_text_config())
    length = max_length or min(limit, MAX_LENGTH)
    if not 2 <= length <= limit:
        raise ValueError(f"max_length is {length}; the model takes 2 to {limit}")
    return length


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
            return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits_transform(self._model.lm_head(hidden[:, -1]))

    def decode(self, inputs: StepInputs) -> torch.Tensor:
        """Run a decode step, without synchronising with the device."""
        with self._together("decode", (inputs.stop, inputs.table)):
            return self._decode(inputs)

    def _decode(self, inputs: StepInputs) -> torch.Tensor:
        self._cache.window = DecodeWindow(inputs.rows, inputs.positions, inputs.stop)
        positions = inputs.rotary[:, None]
        if self._family.axes:
            positions = positions.expand(self._family.axes, -1, -1)
        output = self._text(
            input_ids=inputs.ids[:, None],
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
