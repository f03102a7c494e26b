"""`TransformersRunner`: runs checkpoints of transformers behind the `Runner` protocol.

Model code and loading are those of transformers. This package adds the KV rows, the
positions of each request, and one batched decode step for all running requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lifecycle_engine._compat import max_positions, slot_length
from lifecycle_engine.core.model_runner import (
    Emitted,
    Prompt,
    PromptChunk,
    Sampling,
)
from lifecycle_engine.core.slots import PrefixContents
from lifecycle_engine.model.cuda_graphs import (
    FixedShapeSteps,
    GraphMode,
    Lane,
    StepOptions,
    make_steps,
)
from lifecycle_engine.model.device_copies import detect_device_loss, small_tensor
from lifecycle_engine.model.drafts import make_drafts
from lifecycle_engine.model.families import (
    family_of,
    freeze_rope_frequencies,
    image_spans,
    tensors_needed_until,
)
from lifecycle_engine.model.forward_pass import ForwardPass
from lifecycle_engine.model.kv_cache import (
    WHOLE,
    BatchRows,
    Part,
    RowState,
    SlotCache,
)
from lifecycle_engine.model.loader import load_model
from lifecycle_engine.model.sampler import (
    GenerationRules,
    LogitsProcessors,
    Sampler,
    sample_tokens,
)


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
        speculative: str | None = None,
        draft_tokens: int = 4,
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
            speculative: Where drafts of further tokens come from: ``"ngram"`` repeats
                earlier text, ``"draft=FOLDER"`` runs a smaller text model.
            draft_tokens: Maximum number of drafts in a step.
            part: What this process has of the model.

        Raises:
            ValueError: An unsupported family, generation config or length, or graphs
                without CUDA.
        """
        self.model, self.slots = model, slots
        self.max_length = _slot_length(model, max_length)
        _check_graphs(graphs, model.device)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._family = family_of(model.config)
        freeze_rope_frequencies(model)
        self.keep = self._family.keep
        self.cache = SlotCache(
            model, slots=slots, max_length=self.max_length, part=part
        )
        self._processors = LogitsProcessors(
            GenerationRules.from_config(model.generation_config),
            slots=slots,
            vocab_size=self.vocab_size,
            device=model.device,
        )
        self.forward = ForwardPass(model, self._family, self.cache, part.together)
        options = StepOptions(graphs, slots, max_batch, buckets)
        length = self.max_length
        self._drafts = make_drafts(speculative, draft_tokens, model, options, length)
        self._drafted = self._accepted = 0
        sizes = {"max_length": length, "tokens": 1 + self._drafts.tokens}
        self._rows = BatchRows(self.cache, slots=slots, **sizes)
        decode, device = self.forward.decode, model.device
        self._steps = make_steps(decode, options, device=device, **sizes)

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
        speculative: str | None = None,
        draft_tokens: int = 4,
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
            speculative: See `__init__`.
            draft_tokens: See `__init__`.

        Raises:
            OSError: A folder holds no checkpoint.
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
            speculative=speculative,
            draft_tokens=draft_tokens,
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
        with detect_device_loss(self.model.device), torch.inference_mode():
            if isinstance(self._steps, FixedShapeSteps):
                self._steps.prepare()
            self._drafts.capture()

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
            kept = self._rows.resume(slot, Sampler(prompt.sampling), contents)
            self._drafts.truncate(slot, kept)
            return kept

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Run a chunk of the prompt and its images; the last chunk samples a token."""
        (output,) = self.prefill_together([PromptChunk(slot, prompt, start, stop)])
        if isinstance(output, Exception):
            raise output
        return output

    def prefill_together(
        self, chunks: Sequence[PromptChunk]
    ) -> list[Emitted | Exception | None]:
        """Run chunks of several prompts in one pass, padded to the longest."""
        with detect_device_loss(self.model.device), torch.inference_mode():
            for each in chunks:
                if not each.start:
                    self._assign(each.slot, each.prompt)
                    self._family.prepare_positions(self.model, each.prompt)
                else:  # also where a pass of several has failed and each runs again
                    self._drafts.truncate(each.slot, each.start)
            return self._prefill(chunks)

    def decode(self, slots: Sequence[int]) -> list[Emitted | list[Emitted] | Exception]:
        """Run the last token of each slot and drafts; return the tokens that follow.

        A slot has a list only if there are several.
        """
        states = [self._rows[slot] for slot in slots]
        with detect_device_loss(self.model.device), torch.inference_mode():
            emitted = self._step(slots, states, self._propose(slots, states))
            for at, each in enumerate(emitted):
                if isinstance(each, Exception) and self._drafts.tokens:
                    # A draft may be what is not finite, even one that was rejected.
                    row, length = states[at].row, states[at].length
                    self.cache.clear(row, length, self.max_length)
                    (emitted[at],) = self._step([slots[at]], [states[at]], [[]])
        outputs: list[Emitted | list[Emitted] | Exception] = []
        for state, each in zip(states, emitted, strict=True):
            if isinstance(each, Exception):
                outputs.append(each)
                continue
            state.length += len(each)
            self._record(state, each)
            outputs.append(each if len(each) > 1 else each[0])
        return outputs

    def _step(
        self,
        slots: Sequence[int],
        states: Sequence[RowState],
        drafts: Sequence[Sequence[int]],
    ) -> list[list[Emitted] | Exception]:
        """Run the last token of each slot and its drafts; see `_sample`."""
        width = self._rows.pack(slots, self._steps.width)
        lanes = [
            Lane(state.row, (state.token, *draft), state.length, state.delta)
            for state, draft in zip(states, drafts, strict=True)
        ]
        rows = small_tensor([state.row for state in states], self.model.device)
        logits = self._steps.run(lanes, width)[rows]
        return self._sample(slots, states, lanes, logits)

    def _propose(
        self, slots: Sequence[int], states: Sequence[RowState]
    ) -> list[list[int]]:
        """Return drafts for each slot, as many as its row has positions for."""
        if not self._drafts.tokens:
            return [[] for _ in slots]
        texts = [state.contents.ids for state in states if state.contents is not None]
        drafts = self._drafts.propose(slots, texts)
        room = [self.max_length - 1 - state.length for state in states]
        return [each[:most] for each, most in zip(drafts, room, strict=True)]

    def _sample(
        self,
        slots: Sequence[int],
        states: Sequence[RowState],
        lanes: Sequence[Lane],
        logits: torch.Tensor,
    ) -> list[list[Emitted] | Exception]:
        """Sample the tokens after each lane's own, as long as they are its drafts.

        A draft is accepted if it is what the request's sampler yields at its place,
        with the random number of that place. So the tokens are those of a run without
        drafts, whatever the drafts are.
        """
        emitted: list[list[Emitted] | Exception] = [[] for _ in lanes]
        left = list(range(len(lanes)))
        for at in range(logits.shape[1]):
            own = logits[small_tensor(left, logits.device), at]
            processed = self._processors.next(
                [slots[lane] for lane in left],
                [lanes[lane].tokens[at] for lane in left],
                [lanes[lane].length + 1 + at for lane in left],
                own,
            )
            sampled = sample_tokens(
                processed, [states[lane].sampler for lane in left], own
            )
            accepted = []
            for lane, each in zip(left, sampled, strict=True):
                so_far = emitted[lane]
                if isinstance(each, Exception):
                    # A later token is generated again by the next step.
                    emitted[lane] = so_far or each
                    states[lane].sampler.again = True
                    continue
                assert isinstance(so_far, list)
                so_far.append(each)
                if lanes[lane].tokens[at + 1 : at + 2] == (each.token,):
                    accepted.append(lane)
            left = accepted
            self._accepted += len(left)
            if not left:
                break
        self._drafted += sum(len(lane.tokens) - 1 for lane in lanes)
        return emitted

    def free(self, slot: int) -> None:
        """Discard a slot's state and zero its row."""
        with detect_device_loss(self.model.device), torch.inference_mode():
            self._rows.free(slot)
            if self._drafts.tokens:
                self._drafts.free(slot)

    def status(self) -> dict[str, Any]:
        """Return the bytes of the KV rows, the number of graphs and device memory."""
        counters: dict[str, Any] = {"kv_bytes": self.cache.nbytes}
        if self._drafts.tokens:
            counters["draft_tokens"] = self._drafted
            counters["draft_tokens_accepted"] = self._accepted
        if isinstance(self._steps, FixedShapeSteps):
            counters["graphs"] = self._steps.captured
        if self.model.device.type == "cuda":
            counters["device_bytes"] = torch.cuda.memory_allocated()
            counters["device_bytes_reserved"] = torch.cuda.memory_reserved()
        return counters

    def _assign(self, slot: int, prompt: Prompt) -> None:
        contents = None
        if prompt.session:
            contents = self._contents(prompt)
        elif self._drafts.tokens:
            contents = PrefixContents(list(prompt.input_ids))
        self._rows.assign(slot, Sampler(prompt.sampling), contents)
        self._drafts.truncate(slot, 0)

    def _contents(self, prompt: Prompt) -> PrefixContents:
        images = image_spans(self._family, prompt)
        return PrefixContents(list(prompt.input_ids), images)

    def _prefill(
        self, chunks: Sequence[PromptChunk]
    ) -> list[Emitted | Exception | None]:
        states = [self._rows[each.slot] for each in chunks]
        for state, each in zip(states, chunks, strict=True):
            # Before the pass, so that the row is zeroed even if the pass fails.
            state.length = each.stop
        hidden = self.forward.prefill(
            [(state.row, *each[1:]) for state, each in zip(states, chunks, strict=True)]
        )
        self._drafts.extend(
            [each.slot for each in chunks],
            [each.prompt.input_ids[: each.stop] for each in chunks],
        )
        outputs: list[Emitted | Exception | None] = [None] * len(chunks)
        ends = [len(each.prompt.input_ids) for each in chunks]
        done = [lane for lane, each in enumerate(chunks) if each.stop == ends[lane]]
        if not done:
            return outputs
        logits = self.forward.logits(hidden)[done]
        ids = [chunks[lane].prompt.input_ids for lane in done]
        processed = [
            self._processors.first(chunks[lane].slot, of, own[None])
            for lane, of, own in zip(done, ids, logits, strict=True)
        ]
        samplers = [states[lane].sampler for lane in done]
        sampled = sample_tokens(torch.cat(processed), samplers, logits)
        for lane, output in zip(done, sampled, strict=True):
            outputs[lane] = output
            if isinstance(output, Emitted):
                states[lane].delta = self._family.delta(chunks[lane].prompt)
                self._record(states[lane], [output])
        return outputs

    def _record(self, state: RowState, emitted: Sequence[Emitted]) -> None:
        for each in emitted:
            assert each.token is not None
            state.token = each.token
            if state.contents is not None:
                state.contents.ids.append(each.token)


def _check_graphs(graphs: GraphMode, device: torch.device) -> None:
    if graphs == "on" and device.type != "cuda":
        raise ValueError(f"graphs is on, the device {device}; they need cuda")


def _slot_length(model: Any, max_length: int | None) -> int:
    text = model.config.get_text_config()
    limit, length = max_positions(text), slot_length(text, max_length)
    if not 2 <= length <= limit:
        raise ValueError(f"max_length is {length}; the model takes 2 to {limit}")
    return length
