"""Optional dependencies: which package is missing, and access to transformers.

Names of transformers are looked up at run time and typed as ``Any``: its annotations
change between releases and describe less than it accepts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from json import JSONDecodeError as JSONError
from pathlib import Path
from typing import Any


def require_packages(*names: str) -> None:
    """Check that packages of the extra are installed, without importing them.

    Packages of `lifecycle_engine` call it, not the package itself: the engine process
    needs torch and none of the server's packages.

    Raises:
        ModuleNotFoundError: One of them is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f'lifecycle_engine needs {name}; pip install "anyio-lifecycle[engine]"',
                name=name,
            )


def hf(name: str, module: str = "") -> Any:
    """Import ``transformers`` or a module of it and return one of its names."""
    where = f"transformers.{module}" if module else "transformers"
    return getattr(importlib.import_module(where), name)


@contextlib.contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide progress bars of transformers, which would clutter the log."""
    enabled = hf("is_progress_bar_enabled", "utils.logging")()
    hf("disable_progress_bar", "utils.logging")()
    try:
        yield
    finally:
        if enabled:
            hf("enable_progress_bar", "utils.logging")()


@contextlib.contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Turn errors of transformers about a checkpoint into `ValueError`s for users."""
    try:
        yield
    except Exception as error:
        # JSONDecodeError does not name its file, so it is wrapped.
        if isinstance(error, OSError | ValueError) and type(error) is not JSONError:
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"transformers cannot load the {what}: {type(error).__name__}: {first}"
        ) from error


def config_of(checkpoint: str | Path) -> Any:
    """Read the config of a checkpoint folder.

    Raises:
        OSError: There is no checkpoint.
        ValueError: transformers cannot read it without running code from the folder.
    """
    with readable_errors("config"):
        return hf("AutoConfig").from_pretrained(
            str(checkpoint), local_files_only=True, trust_remote_code=False
        )


def max_positions(text: Any) -> int:
    """Return the maximum number of positions of a language model.

    Where frequencies depend on the longest request of a batch, requests would change
    each other's tokens; such models are limited to the length where that starts.
    """
    limit: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = min(limit, rope["original_max_position_embeddings"])
    return limit


def slot_length(text: Any, wanted: int | None) -> int:
    """Return the tokens of a KV slot: *wanted*, or the model's maximum up to 8192."""
    return wanted or min(max_positions(text), 8192)


def generation_file(checkpoint: str | Path) -> str:
    """Return the name of the file with a checkpoint's generation config.

    Older checkpoints have its options in the model's config.
    """
    own = "generation_config.json"
    return own if (Path(checkpoint) / own).exists() else "config.json"


def generation_options(checkpoint: str | Path) -> dict[str, Any]:
    """Return a checkpoint's generation config, without the defaults of its class.

    Raises:
        OSError: There is no such file.
        ValueError: It is not a JSON object.
    """
    path = Path(checkpoint) / generation_file(checkpoint)
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path.name} is not a JSON object")  # noqa: TRY004  a bad file
    return options


def token_ids(value: Any, name: str) -> Sequence[int]:
    """Return the token ids of an option, which may be one id, a list or ``None``.

    Raises:
        ValueError: They are not token ids.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(type(token) is not int for token in ids):
        raise ValueError(
            f"the generation config's {name} must be one token id or several"
        )
    return ids
