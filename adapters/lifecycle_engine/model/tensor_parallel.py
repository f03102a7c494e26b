"""Tensor parallel: one model on several ranks, each a process with a part of it.

transformers' own plans cut the weights of the language model; its forward passes then
need all ranks at once. Rank 0 is the engine process. Its `TransformersRunner` samples,
assigns rows and encodes images, and has the other ranks run the same passes over rows
of their own: they receive token ids, positions and features of images, and nothing
else of a request. So the scheduler knows nothing of ranks.

Ranks that are out of step stay so. Therefore an error in a pass, or the death of any
rank, ends the engine process, and the others end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lifecycle.lowlevel import describe_error
from lifecycle_engine._compat import hf
from lifecycle_engine.core.model_runner import EXIT_DEVICE_LOST, DeviceLost
from lifecycle_engine.model.cuda_graphs import GraphMode, StepInputs, StepShape
from lifecycle_engine.model.families import EncodedImage, takes_images
from lifecycle_engine.model.forward_pass import Chunk
from lifecycle_engine.model.kv_cache import Part, alone
from lifecycle_engine.model.loader import load_config, load_model
from lifecycle_engine.model.transformers_runner import TransformersRunner

# Idle ranks wait in a collective. One that hangs is the supervisor's business.
_FOREVER = timedelta(days=3650)
_LAYER = "layers.*.self_attn."


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The attention heads of each rank.

    Attributes:
        queries: Query heads.
        keys: Key heads.
        share: Number of ranks that hold a copy of the same key head.
    """

    queries: int
    keys: int
    share: int = 1

    @classmethod
    def of(cls, text: Any, ranks: int) -> HeadSplit:
        """Split the heads of a language model's config.

        Raises:
            ValueError: They cannot be split evenly.
        """
        queries, keys = text.num_attention_heads, text.num_key_value_heads
        if _plan(text).get(f"{_LAYER}k_proj") != "colwise":
            return cls(queries, keys)  # each rank gathers all heads
        fits = [
            n
            for n in range(1, queries + 1)
            if not queries % n and not (keys % n and n % keys)
        ]
        if ranks not in fits:
            raise ValueError(
                f"tp is {ranks}; the model's {queries} query heads and {keys} key "
                f"heads can be split among {', '.join(map(str, fits))} ranks"
            )
        return cls(queries // ranks, max(keys // ranks, 1), max(ranks // keys, 1))


def _plan(text: Any) -> dict[str, str]:
    """Return how a language model's layers are cut, by their names.

    Raises:
        ValueError: transformers has no plan for the model.
    """
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    if text.model_type == "qwen3_vl_text":
        # Its own plan leaves the layers whole; they are those of Qwen3.
        plan |= hf("Qwen3Config").base_model_tp_plan
    if not plan:
        raise ValueError(
            f"tp is above 1; transformers has no tensor parallel plan for "
            f"{text.model_type}: leave tp at 1"
        )
    return plan


def distributed_config(config: Any, ranks: int) -> Any:
    """Return transformers' ``DistributedConfig`` for a model's config.

    Raises:
        ValueError: The model cannot be split among that many ranks.
    """
    text = config.get_text_config()
    heads = HeadSplit.of(text, ranks)
    plan = _plan(text)
    if heads.share > 1:
        # Whole on each rank, and cut by `keep_own_key_head`.
        plan |= dict.fromkeys((f"{_LAYER}k_proj", f"{_LAYER}v_proj"), "replicate")
    prefix = "model.language_model." if takes_images(config) else "model."
    return hf("DistributedConfig", "distributed")(
        tp_size=ranks, tp_plan={prefix + name: style for name, style in plan.items()}
    )


def keep_own_key_head(model: Any, heads: HeadSplit, rank: int) -> None:
    """Reduce a rank's whole key and value projections to its one key head."""
    for module in model.modules():
        if heads.share == 1 or not hasattr(module, "k_proj"):
            continue
        if getattr(module, "num_key_value_groups", None) is None:
            continue  # of a vision tower
        module.num_key_value_groups = heads.queries
        size, at = module.head_dim, rank // heads.share * module.head_dim
        for linear in (module.k_proj, module.v_proj):
            linear.out_features = size
            for name, whole in list(linear.named_parameters(recurse=False)):
                own = whole[at : at + size].clone()
                setattr(linear, name, torch.nn.Parameter(own, requires_grad=False))


def load_tensor_parallel(
    checkpoint: str | Path,
    *,
    ranks: int,
    device: str,
    graphs: GraphMode = "off",
    **options: Any,
) -> TransformersRunner:
    """Start the other ranks and load the model; return the runner of rank 0.

    From then on, the death of a rank ends this process with `EXIT_DEVICE_LOST`.

    Args:
        checkpoint: A local folder.
        ranks: Number of processes, this one included.
        device: ``"cpu"`` or ``"cuda"``, with one GPU for each rank.
        graphs: See `TransformersRunner`; ``"on"`` is refused.
        options: The other options of `TransformersRunner.load`.

    Raises:
        OSError: The folder holds no checkpoint.
        ValueError: Unsupported sizes, or a model that cannot be split or run.
    """
    if graphs == "on":
        raise ValueError(f"graphs is on and tp is {ranks}; use graphs with tp 1 only")
    _check_devices(device, ranks)
    distributed_config(load_config(checkpoint), ranks)
    own = {name: options.pop(name) for name in _OF_RANK_0 if name in options}
    alike = {"checkpoint": str(checkpoint), "ranks": ranks, "device": device, **options}
    # Until all ranks have run a pass: transformers makes process groups of its own.
    with contextlib.ExitStack() as stack:
        store = _store(stack)
        for rank in range(1, ranks):
            _start(rank, store, alike)
        stack.enter_context(_environment(0))
        runner = _load(0, store, **alike, graphs=graphs, **own)
        try:
            runner.self_test()
        except DeviceLost as error:
            cause = str(error.__cause__).strip().partition("\n")[0]
            raise ValueError(f"the model does not run with tp {ranks}: {cause}") from (
                error
            )
    return runner


def _store(stack: contextlib.ExitStack) -> str:
    """Return the name of a file where the ranks meet."""
    try:  # left by no kill; open, as its number may be reused
        return f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"
    except (AttributeError, OSError):  # a Python or a sandbox without
        folder = tempfile.TemporaryDirectory(prefix="lifecycle-ranks-")
        return str(Path(stack.enter_context(folder)) / "store")


_OF_RANK_0 = ("max_batch", "buckets", "speculative", "draft_tokens")


def _check_devices(device: str, ranks: int) -> None:
    count = torch.cuda.device_count()
    if device == "cuda" and count < ranks:
        raise ValueError(f"tp is {ranks}; torch sees {count} GPUs: give that or less")
    if device == "cpu" and count:
        raise ValueError(
            f"tp is {ranks} on the CPU, and transformers would use the {count} GPUs of "
            'this machine; set CUDA_VISIBLE_DEVICES="", or give --device cuda'
        )


# Before torch is imported, which takes long: a rank that meets no other one holds the
# interpreter's lock. Rank 0 decides when it ends, however many get a service's signals.
_RANK = """
from lifecycle_zmq.process import exit_with_parent, ignore_stop_signals
exit_with_parent()
ignore_stop_signals()
from lifecycle_engine.model.tensor_parallel import main
main()
"""


def _start(rank: int, store: str, alike: dict[str, Any]) -> None:
    argv = [sys.executable, "-c", _RANK, str(rank), store, json.dumps(alike)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE)

    def watch() -> None:
        status = child.wait()
        sys.stderr.write(f"lifecycle-engine: rank {rank} ended with status {status}\n")
        sys.stderr.flush()
        if not store.startswith("/proc/"):
            shutil.rmtree(Path(store).parent, ignore_errors=True)
        os._exit(EXIT_DEVICE_LOST)

    threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()


@contextlib.contextmanager
def _environment(rank: int) -> Iterator[None]:
    """Set what transformers and gloo read until all ranks have run a pass."""
    wanted = {"LOCAL_RANK": str(rank)}
    if sys.platform == "linux":  # all ranks are here: no port for other machines
        wanted["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _load(
    rank: int,
    store: str,
    *,
    checkpoint: str,
    ranks: int,
    device: str,
    dtype: str = "float32",
    threads: int | None = None,
    **options: Any,
) -> TransformersRunner:
    """Meet the other ranks and load this rank's part of the model."""
    if threads is not None:
        torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=_FOREVER,
    )
    config = load_config(checkpoint)
    model = load_model(
        checkpoint,
        device=device,
        dtype=dtype,
        distributed=distributed_config(config, ranks),
    )
    heads = HeadSplit.of(config.get_text_config(), ranks)
    keep_own_key_head(model, heads, rank)
    part = Part(heads.keys, alone if rank else together)
    return TransformersRunner(model, part=part, **options)


@contextlib.contextmanager
def together(
    name: str, numbers: Sequence[Any], images: EncodedImage | None = None
) -> Iterator[None]:
    """Have the other ranks do what the body of the block does on rank 0.

    Args:
        name: What; see `Follower`.
        numbers: Its integers, or tensors of them.
        images: Features of images.

    Raises:
        DeviceLost: The body failed, so that the ranks are out of step.
    """
    try:
        # A first element, because there may be no other.
        parts = [torch.as_tensor(each).cpu().flatten() for each in (0, *numbers)]
        states = torch.empty(0, 0, 0)
        if images is not None:
            # In float32, which holds every value of the other types.
            states = torch.stack([images.features, *images.deep]).float()
        message = torch.cat(parts)
        message[0] = _NAMES.index(name)
        dist.broadcast(torch.tensor([len(message), *states.shape]), 0)
        dist.broadcast(message, 0)
        if images is not None:
            dist.broadcast(states, 0)
        yield
    except Exception as error:
        where = describe_error(error)
        raise DeviceLost(f"the ranks are out of step after {where}") from error


_NAMES = ("clear", "swap", "prefill", "logits", "decode")


class Follower:
    """A rank other than 0: runs what rank 0 sends, over rows of its own.

    Args:
        runner: Its part of the model; the scheduler's side of it is not used.
    """

    def __init__(self, runner: TransformersRunner) -> None:
        self._cache, self._forward = runner.cache, runner.forward
        self._device, self._dtype = runner.model.device, runner.model.dtype
        self._hidden = torch.empty(0)

    def run(self) -> None:
        """Follow rank 0 until this process is ended."""
        with torch.inference_mode():
            while True:
                header = torch.empty(4, dtype=torch.long)
                dist.broadcast(header, 0)
                length, *shape = header.tolist()
                message = torch.empty(length, dtype=torch.long)
                dist.broadcast(message, 0)
                images = self._receive(shape) if shape[0] else None
                call, *numbers = message.tolist()
                self._follow(_NAMES[call], numbers, images)

    def _receive(self, shape: Sequence[int]) -> EncodedImage:
        states = torch.empty(*shape, dtype=torch.float32, device=self._device)
        dist.broadcast(states, 0)
        features, *deep = states.to(self._dtype)
        return EncodedImage(features, deep)

    def _follow(
        self, name: str, numbers: list[int], images: EncodedImage | None
    ) -> None:
        if name == "clear":
            self._cache.clear(*numbers)
        elif name == "swap":
            self._cache.swap(*numbers)
        elif name == "prefill":
            self._hidden = self._forward.run(Chunk.unpack(numbers), images)
        elif name == "logits":
            self._forward.logits(self._hidden)
        else:
            self._decode(StepShape(*numbers[:3]), torch.tensor(numbers[3:]))

    def _decode(self, shape: StepShape, table: torch.Tensor) -> None:
        reserved = self._cache.reserved
        inputs = StepInputs(shape, reserved=reserved, device=self._device)
        inputs.load(table.view(4, -1).tolist())
        self._forward.decode(inputs)


def main() -> None:
    """Run a rank other than 0, which rank 0 started."""
    rank, store, alike = sys.argv[1:]
    with _environment(int(rank)):  # this process is nothing but a rank
        try:
            follower = Follower(_load(int(rank), store, **json.loads(alike)))
        except (OSError, ValueError) as error:
            raise SystemExit(f"lifecycle-engine: cannot start: {error}") from None
        follower.run()
