"""The requests and how each client behaves, decided before the first request.

Everything is drawn from one seed, so two runs send the same requests and the same
clients leave in the same phase. Only the clock differs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from . import pictures
from .pictures import Picture

Phase = Literal["queued", "preprocessing", "before the first token", "mid stream"]
"""Where a request is when its client leaves it."""

POLITE = "polite"
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of one client.

    Attributes:
        number: Its place in the plan.
        picture: What it sends along, if anything.
        max_tokens: What it asks for.
        stream: Whether it wants chunks.
        leaves: The phase in which the client disconnects, if it does.
        after: Chunks that the client reads before it disconnects mid stream.
        bad: What is wrong with the request, if it is a bad one.
    """

    number: int
    picture: Picture | None
    max_tokens: int
    stream: bool
    leaves: Phase | None = None
    after: int = 0
    bad: str | None = None

    def body(self, model: str) -> dict[str, Any]:
        """Return the arguments of `chat.completions.create`."""
        content: list[dict[str, Any]] = [
            {"type": "text", "text": f"What is in picture {self.number}?"}
        ]
        if self.picture is not None:
            part = {"type": "image_url", "image_url": {"url": self.picture.url}}
            content.append(part)
        return {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "stream": self.stream,
        }


def plan(requests: int, seed: int) -> list[Job]:
    """Draw *requests* jobs: a third of the clients leave, one in twelve is wrong."""
    chance = random.Random(seed)
    album, weights = pictures.album(chance)
    wrong = {
        "not an image": pictures.no_image(),
        "truncated image": pictures.truncated(album[2]),
        "decompression bomb": pictures.bomb(),
        "negative max_tokens": album[0],
    }
    return [
        _job(
            number,
            manner,
            wrong.get(manner) or chance.choices([*album, None], [*weights, 10])[0],
            chance,
        )
        for number, manner in enumerate(_manners(requests, tuple(wrong), chance))
    ]


def _job(
    number: int, manner: str, picture: Picture | None, chance: random.Random
) -> Job:
    leaves = next((phase for phase in PHASES if phase == manner), None)
    tokens = chance.randint(24, 96)
    return Job(
        number=number,
        picture=picture,
        max_tokens=-1 if manner == "negative max_tokens" else tokens,
        # A client can only disconnect mid stream if it streams.
        stream=leaves == "mid stream" or chance.random() < 0.7,
        leaves=leaves,
        after=chance.randint(1, 12),
        bad=manner if manner != POLITE and leaves is None else None,
    )


def _manners(requests: int, wrong: tuple[str, ...], chance: random.Random) -> list[str]:
    """Return how each client behaves, in random order."""
    leaving = [PHASES[index % len(PHASES)] for index in range(requests // 3)]
    failing = [wrong[index % len(wrong)] for index in range(requests // 12)]
    polite = [POLITE] * (requests - len(leaving) - len(failing))
    manners = [*leaving, *failing, *polite]
    chance.shuffle(manners)
    return manners
