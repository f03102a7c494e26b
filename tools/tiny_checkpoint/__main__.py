"""``python -m tiny_checkpoint``: build a checkpoint and print its folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import FAMILIES, build, cached


def main(argv: Sequence[str] | None = None) -> int:
    """Build what the arguments ask for; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.out is None:
            folder = cached(options.family)
        else:
            folder = build(options.out, options.family, options.seed)
    except OSError as error:
        print(f"cannot write a checkpoint: {error}; name another DIR", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tiny_checkpoint",
        description="Build a tiny random checkpoint, offline, and print its folder.",
    )
    parser.add_argument(
        "out",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="folder to write; without it, a folder under ~/.cache that is built once",
    )
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--seed", type=int, default=0, help="draws the weights of DIR")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
