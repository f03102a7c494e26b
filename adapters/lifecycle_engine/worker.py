"""The engine process: its command line, runner, scheduler and link."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from lifecycle_engine.core.model_runner import EXIT_DEVICE_LOST, DeviceLost, Runner
from lifecycle_engine.core.scheduler import Scheduler
from lifecycle_zmq import ArenaView, EngineServer, exit_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine process; return its exit status.

    After the loss of a device the process exits at once with `EXIT_DEVICE_LOST`,
    because destructors would hang in the driver.
    """
    options = _parser().parse_args(argv)
    try:
        scheduler = _build(options)
        cuda = options.runner == "torch" and options.device == "cuda"
        server = EngineServer(
            options.endpoint,
            scheduler,
            incarnation=options.incarnation,
            writable_arena=cuda,
        )
        if cuda and server.arena is not None:
            _pin(server.arena)
        server.run()
    except DeviceLost as error:
        sys.stderr.write(f"lifecycle-engine: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_DEVICE_LOST)
    return 0


def make_backend(argv: Sequence[str]) -> Scheduler:
    """Build the backend that an engine process with this command line would serve.

    Raises:
        SystemExit: The options are invalid, or the model cannot be loaded.
    """
    return _build(_parser().parse_args([*argv, "--endpoint=", "--incarnation=1"]))


def _build(options: argparse.Namespace) -> Scheduler:
    try:
        return Scheduler(
            build_runner(options),
            max_batch=options.max_batch,
            max_waiting=options.max_waiting,
            max_tokens=options.max_tokens,
            chunk=options.chunk,
            merge="concatenate",  # both runners stream lists of tokens
        )
    except (OSError, ValueError) as error:
        # A wrong option or folder needs a message, not a traceback.
        raise SystemExit(f"lifecycle-engine: cannot start: {error}") from None


def build_runner(options: argparse.Namespace) -> Runner:
    """Build the runner that the options select; torch is imported only if needed."""
    if options.runner == "sim":
        from lifecycle_engine.sim import SimCost, SimRunner

        given = {name: getattr(options, f"sim_{name}") for name in _SIM_COST}
        costs = {name: cost for name, cost in given.items() if cost is not None}
        return SimRunner(
            slots=options.slots or options.max_batch,
            max_length=options.max_length or 8192,
            cost=SimCost(**costs),
        )
    if options.checkpoint is None:
        raise SystemExit(
            "--runner torch needs --checkpoint DIR, a folder in the format of "
            "transformers; --runner sim needs none"
        )
    cuda = options.device == "cuda"
    graphs = "on" if cuda and options.tp == 1 else "off"
    return _load_of(options.tp)(
        options.checkpoint,
        device=options.device,
        dtype=options.dtype or ("auto" if cuda else "float32"),
        threads=options.threads,
        slots=options.slots or options.max_batch,
        max_batch=options.max_batch,
        max_length=options.max_length,
        graphs=options.graphs or graphs,
        buckets=options.bucket or (),
        speculative=options.speculative,
        draft_tokens=options.draft_tokens,
    )


def _load_of(ranks: int) -> Callable[..., Runner]:
    if ranks == 1:
        from lifecycle_engine.model.transformers_runner import TransformersRunner

        return TransformersRunner.load
    from lifecycle_engine.model.tensor_parallel import load_tensor_parallel

    return partial(load_tensor_parallel, ranks=ranks)


def _pin(arena: ArenaView) -> None:
    from lifecycle_engine.model.device_copies import pin

    if not pin(arena):
        sys.stderr.write("lifecycle-engine: the device refused to pin the arena\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lifecycle-engine-worker", description="The engine process."
    )
    add = parser.add_argument
    add("--runner", choices=("torch", "sim"), default="torch")
    add("--checkpoint", metavar="DIR", help="local checkpoint folder (torch)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--dtype",
        help='torch dtype, or "auto" for the checkpoint\'s own; default: that on cuda, '
        "float32 on cpu",
    )
    add("--tp", type=_positive, default=1, help="processes that share the model")
    add("--threads", type=_positive, default=1, help="CPU threads of torch")
    add(
        "--slots",
        type=_positive,
        help="number of requests that can hold KV; default: --max-batch",
    )
    add(
        "--max-batch",
        type=_positive,
        default=8,
        help="maximum number of running requests",
    )
    add(
        "--max-waiting",
        type=_positive,
        help="maximum number of queued requests; default: no limit",
    )
    add("--max-tokens", type=_positive, help="upper limit of a request's max_tokens")
    add(
        "--max-length",
        type=_positive,
        help="tokens of a KV slot; default: the model's limit, at most 8192",
    )
    add(
        "--chunk",
        type=_positive,
        default=512,
        help="maximum number of prompt tokens prefilled in one step",
    )
    add(
        "--graphs",
        choices=("off", "fake", "on"),
        help="decode with CUDA graphs; default: on with --device cuda, without --tp",
    )
    add(
        "--bucket",
        type=_positive,
        action="append",
        help="batch size of a graph; may be repeated; default: powers of two",
    )
    _add_drafts(parser)
    for name in _SIM_COST:
        add(f"--sim-{name.replace('_', '-')}", type=float)
    add("--endpoint", required=True, help="address that the API process connects to")
    add("--incarnation", type=int, required=True, help="number of this engine instance")
    return parser


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculative",
        metavar="ngram|draft=DIR",
        help="check drafts of further tokens in each step; default: no drafts",
    )
    parser.add_argument(
        "--draft-tokens", type=_positive, default=4, help="most drafts in a step"
    )


# Those of `SimCost`, which a process that runs a model need not import.
_SIM_COST = ("prefill_token", "prefill_pixel", "decode_step", "decode_lane")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


if __name__ == "__main__":
    exit_with_parent()  # before the model is loaded, which takes long
    _status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Finalising an interpreter with torch takes longer than a shutdown may.
    os._exit(_status)
