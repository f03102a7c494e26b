"""What a request gets that does not say: OpenAI's own defaults, or a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .models._hf import generation_file, generation_options

# What may stand in a file.
_LIMITS = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1)}
_LIMITS |= {"min_p": (0, 1)}
# What draws other tokens and is not known here, with what leaves them alone.
_UNKNOWN = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}


class Asked(Protocol):
    """What a request says of its draws, ``None`` where it is silent."""

    @property
    def temperature(self) -> float | None:
        """0 is greedy."""
        ...

    @property
    def top_p(self) -> float | None:
        """Share of the probability to draw from."""
        ...

    @property
    def top_k(self) -> int | None:
        """How many tokens to draw from."""
        ...

    @property
    def min_p(self) -> float | None:
        """Least share of the likeliest token's probability."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDefaults:
    """What a request gets that does not say.

    Attributes:
        max_tokens: Tokens to generate at most.
        temperature: 0 is greedy. OpenAI's own default is 1.
        top_p: Share of the probability to draw from; 1 is all of it.
        top_k: How many of the likeliest tokens to draw from; 0 is all, and so is -1.
        min_p: Least share of the likeliest token's probability to be drawn with.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def sampling(self, asked: Asked) -> dict[str, Any]:
        """How a request draws: as it asks, else as here."""
        names = ("temperature", "top_p", "top_k", "min_p")
        said = {name: getattr(asked, name) for name in names}
        here = {name: getattr(self, name) for name in names}
        here |= {name: each for name, each in said.items() if each is not None}
        return here | {"top_k": max(here["top_k"], 0)}


def defaults_of(checkpoint: str | Path) -> ChatDefaults:
    """Read off a checkpoint's generation config how its authors draw from it.

    Where it says ``do_sample: false``, greedily. What it does not say is as OpenAI's:
    not `generate`'s own ``top_k`` of 50, which no other server takes for the model's.

    Raises:
        OSError: No checkpoint there.
        ValueError: An option out of its range, or one that is not known here.
    """
    name = generation_file(checkpoint)
    told = generation_options(checkpoint)
    for each, neutral in _UNKNOWN.items():
        if told.get(each, neutral) not in (None, neutral):
            raise ValueError(
                f"{name} has {each}, which is not known here; take it out, or give "
                f"--sampling-defaults openai"
            )
    found = {each: told[each] for each in _LIMITS if told.get(each) is not None}
    for each, value in found.items():
        _check(name, each, value)
    if told.get("do_sample") is False:
        found["temperature"] = 0.0
    return ChatDefaults(**found)


def _check(name: str, option: str, value: Any) -> None:
    low, high = _LIMITS[option]
    kinds = (int,) if option == "top_k" else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(
            f"{name} has {option} of {value!r}; expected {low} to {high}: mend it, or "
            f"give --sampling-defaults openai"
        )
