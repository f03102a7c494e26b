"""What drafts save: a model that is trained to be predictable, with and without them.

    python benchmarks/drafts.py --json benchmarks/results/drafts.json

The text is blocks of random tokens, each of them repeated: after one block, the rest
can be known. A small model and a smaller one learn that in a minute, then continue
blocks that they have not seen. What serves is the small model, made wide with zeros:
the same tokens at the cost of a larger one. The ways take turns; tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _figures import machine, write

_SYMBOLS, _BLOCK, _LENGTH, _ANSWER = 8, 32, 128, 64
_HEAD = 32
# Hidden width, layers and steps of training: the draft is to be wrong now and then.
# The other computes what the model does, at the cost of these layers.
_SIZES = {"model": (128, 2, 120), "draft": (64, 2, 55)}
_SERVED = (1024, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, print a line for each way, and write them down if asked to."""
    parser = argparse.ArgumentParser(description="What drafts save.")
    parser.add_argument("--repeats", type=int, default=5, help="medians of so many")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(argv)
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (hidden, layers, steps) in _SIZES.items():
            made = _model(hidden, layers)
            loss = _train(made, steps)
            print(f"  {name}: loss {loss:.2f} in a repeated block", flush=True)
            if name == "model":
                small, made = made, _model(*_SERVED)
                _widen(small, made)
            made.eval().save_pretrained(Path(folder, name))
        rows = _measure(Path(folder), options.repeats)
    for row in rows:
        print(
            f"  {row['way']:<8} {row['requests']} at once: {row['ms_a_token']:.1f} "
            f"ms a token, {row['ratio']:.2f} x ({row['low']:.2f}-{row['high']:.2f}), "
            f"{row['right']:.0%} right, {row['tokens_a_step']:.2f} tokens a step"
        )
    if options.json:
        write(options.json, {"machine": machine(), "rows": rows})
    return 0


def _model(hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_SYMBOLS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD,
        num_key_value_heads=hidden // _HEAD,
        head_dim=_HEAD,
        max_position_embeddings=512,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _train(model: Any, steps: int) -> float:
    """Train a model; return its loss where text can be known."""
    import torch

    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        ids = torch.randint(_SYMBOLS, (32, _BLOCK)).repeat(1, _LENGTH // _BLOCK)
        logits = model(ids).logits[:, _BLOCK:-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, _BLOCK + 1 :].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return float(loss.detach())


def _widen(small: Any, large: Any) -> None:
    """Make the large model compute what the small one does, at its own cost.

    The small one's weights fill a corner of the large one's, with zeros around them,
    and layers of zeros pass on what they are given. A norm divides by the root of a
    mean, in which more elements now count: its weights make up for that.
    """
    import torch

    weights = dict(small.named_parameters())
    with torch.no_grad():
        for name, to in large.named_parameters():
            to.zero_()
            if (of := weights.get(name)) is not None:
                norm = of.dim() == 1
                scale = (of.shape[0] / to.shape[0]) ** 0.5 if norm else 1.0
                to[tuple(slice(size) for size in of.shape)] = of * scale


def _measure(folder: Path, repeats: int) -> list[dict[str, Any]]:
    import torch

    from lifecycle_engine import TransformersRunner

    ways: dict[str, Any] = {"none": {}}
    for count in (2, 4, 8):
        ways[f"ngram {count}"] = {"speculative": "ngram", "draft_tokens": count}
        draft = f"draft={folder / 'draft'}"
        ways[f"draft {count}"] = {"speculative": draft, "draft_tokens": count}
    runners = {
        name: TransformersRunner.load(
            folder / "model", threads=1, max_length=256, **way
        )
        for name, way in ways.items()
    }
    rows = []
    for requests in (1, 8):
        prompts = torch.randint(_SYMBOLS, (requests, _BLOCK)).repeat(1, 2).tolist()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        steps, right, wanted = {}, {}, None
        for turn in range(repeats + 1):
            for name, runner in runners.items():
                before = runner.status()
                tokens, steps[name], spent = _serve(runner, prompts)
                wanted = wanted or tokens
                assert tokens == wanted, f"{name} has other tokens"
                right[name] = _right(before, runner.status())
                seconds[name] += [spent] * bool(turn)  # the first one warms up
        for name in ways:
            of = [a / b for a, b in zip(seconds[name], seconds["none"], strict=True)]
            rows.append(
                {
                    "way": name,
                    "requests": requests,
                    "ms_a_token": 1e3 * statistics.median(seconds[name]) / _ANSWER,
                    "ratio": statistics.median(of),
                    "low": min(of),
                    "high": max(of),
                    "right": right[name],
                    "tokens_a_step": (_ANSWER - 1) / steps[name],
                }
            )
    return rows


def _serve(runner: Any, prompts: list[list[int]]) -> tuple[list[Any], int, float]:
    """Return the tokens of the answers, and the steps and seconds after the prompts."""
    from lifecycle_engine import Scheduler

    scheduler = Scheduler(runner)
    answers: dict[str, list[Any]] = {str(at): [] for at in range(len(prompts))}
    for key, ids in zip(answers, prompts, strict=True):
        scheduler.start(key, {"input_ids": ids, "max_tokens": _ANSWER}, {})
    begin, steps = 0.0, 0
    while scheduler.busy:
        if not begin and scheduler.status()["running"] == len(prompts):
            begin = time.perf_counter()
        steps += bool(begin)
        for output in scheduler.step():
            answers[output.key] += output.items
    return list(answers.values()), steps, time.perf_counter() - begin


def _right(before: dict[str, Any], after: dict[str, Any]) -> float:
    made = after.get("draft_tokens", 0) - before.get("draft_tokens", 0)
    name = "draft_tokens_accepted"
    return (after.get(name, 0) - before.get(name, 0)) / made if made else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
