"""The seam to transformers: looked up by name, typed as ``Any``.

Its annotations come and go between releases and describe less than it accepts;
behind this seam a release can change them without breaking our type check.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from json import JSONDecodeError as JSONError
from pathlib import Path
from typing import Any


def hf(name: str, module: str = "") -> Any:
    """Import ``transformers`` or a module of it and return one of its names."""
    where = f"transformers.{module}" if module else "transformers"
    return getattr(importlib.import_module(where), name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back progress bars, which only clutter the log of a process."""
    enabled = hf("is_progress_bar_enabled", "utils.logging")()
    hf("disable_progress_bar", "utils.logging")()
    try:
        yield
    finally:
        if enabled:
            hf("enable_progress_bar", "utils.logging")()


@contextlib.contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """Turn what transformers raises of a checkpoint, of any type, into `ValueError`."""
    try:
        yield
    except Exception as error:
        # A file that is no JSON is told without its name.
        if isinstance(error, OSError | ValueError) and type(error) is not JSONError:
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"transformers cannot load the {what}: {type(error).__name__}: {first}"
        ) from error


def config_of(checkpoint: str | Path) -> Any:
    """Read the config of a checkpoint folder.

    Raises:
        OSError: No checkpoint there.
        ValueError: Not one that transformers can read, without code from the folder.
    """
    with in_a_sentence("config"):
        return hf("AutoConfig").from_pretrained(
            str(checkpoint), local_files_only=True, trust_remote_code=False
        )


def generation_file(checkpoint: str | Path) -> str:
    """The name of what transformers reads a checkpoint's generation config from.

    In older ones its options stand among those of the model.
    """
    own = "generation_config.json"
    return own if (Path(checkpoint) / own).exists() else "config.json"


def generation_options(checkpoint: str | Path) -> dict[str, Any]:
    """What a checkpoint's generation config says, and not what its class fills in.

    Raises:
        OSError: No such file.
        ValueError: It is no JSON object.
    """
    path = Path(checkpoint) / generation_file(checkpoint)
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path.name} is no JSON object")  # noqa: TRY004  a bad file
    return options


def token_ids(value: Any, name: str) -> Sequence[int]:
    """The ids of an option of a generation config, which may be one or none.

    Raises:
        ValueError: They are not ids.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"the generation config has {name} of other than token ids")
    return ids
