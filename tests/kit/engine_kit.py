"""A checkpoint of any family, loaded on both sides, with `generate` as the oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from lifecycle_engine import (
    Chat,
    ChatProcessor,
    Message,
    Scheduler,
    TransformersRunner,
)
from lifecycle_engine.model.cuda_graphs import Drafts
from lifecycle_engine.model.drafts import find_continuation
from lifecycle_engine.model.families import family_of
from lifecycle_engine.model.loader import load_config, load_model
from tiny_checkpoint import Sizes, build

__all__ = ("COUNT", "Drafts", "Kit", "family_of", "find_continuation")
__all__ += ("load_config", "load_model", "tokens_of")

COUNT = 16
TEXT_ONLY = ("llama", "qwen3")


class Kit:
    """One checkpoint: its processor, its model, and what `generate` makes of it."""

    def __init__(
        self,
        folder: Path,
        family: str,
        sizes: Sizes | None = None,
        *,
        change: Callable[[Any], Any] | None = None,
    ) -> None:
        build(folder, family, sizes=sizes)
        if change is not None:
            rebuild(folder, change)
        self._open(folder, family)

    def copied(self, folder: Path, **files: dict[str, Any]) -> Kit:
        """The same weights, with other values in the JSON files of these names."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        for name, values in files.items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        kit = object.__new__(Kit)
        kit._open(folder, self.family)
        return kit

    def _open(self, folder: Path, family: str) -> None:
        self.folder, self.family = folder, family
        self.processor = ChatProcessor(folder)
        self.model = load_model(folder, device="cpu", dtype="float32")

    @property
    def images(self) -> bool:
        return self.family not in TEXT_ONLY

    def prepare(self, text: str, *pictures: bytes, **options: Any) -> Any:
        """The API process's side of one user message, pictures first."""
        message = Message("user", [*pictures, text])
        return self.processor.prepare(Chat([message], max_tokens=COUNT, **options))

    def runner(self, **options: Any) -> TransformersRunner:
        """A fresh runner over the loaded model."""
        options = {"slots": 4, "max_length": 512} | options
        return TransformersRunner(self.model, **options)

    def generate(self, prepared: Any, count: int = COUNT) -> list[int]:
        """Greedy tokens by transformers' own `generate`, up to what ends a text."""
        ids = torch.tensor([prepared.request["input_ids"]])
        extra = {name: torch.from_numpy(t) for name, t in prepared.tensors.items()}
        if "image_grid_thw" in extra:
            extra["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            **extra,
        )
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return [token for token in tokens if token not in prepared.request["stop_ids"]]

    def serve(self, prepared: list[Any], *, chunk: int, **options: Any) -> list[Any]:
        """Run all of them together, each joining a step after the one before it."""
        scheduler = Scheduler(self.runner(**options), chunk=chunk)
        tokens: dict[str, list[int]] = {}
        waiting = list(enumerate(prepared))
        while waiting or scheduler.busy:
            if waiting:
                index, each = waiting.pop(0)
                tokens[str(index)] = []
                scheduler.start(str(index), each.request, dict(each.tensors))
            for output in scheduler.step():
                tokens[output.key] += tokens_of(output)
        return [tokens[str(index)] for index in range(len(prepared))]


def rebuild(folder: Path, change: Callable[[Any], Any]) -> None:
    """Give a checkpoint another config, and random weights that fit it."""
    config = AutoConfig.from_pretrained(folder)
    config = change(config) or config
    images = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)


def tokens_of(output: Any) -> list[int]:
    """The tokens of one output; its failure is the test's."""
    assert output.finish is None or output.finish.reason != "failed", output.finish
    return [token for item in output.items if type(item) is list for token in item]
