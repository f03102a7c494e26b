"""Draw the state machines of the core: ``docs/states.svg``.

    python scripts/draw_states.py [--check]

One row of states per machine: transitions to the next state are straight, all others
are arcs. With ``--check`` nothing is written, and the exit status says whether the
file is what this script draws.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

_OUT = Path(__file__).resolve().parents[1] / "docs" / "states.svg"
_LEFT, _TOP, _ROW, _COLUMN = 24, 110, 248, 218
_WIDE, _HIGH = 104, 36


@dataclass(frozen=True, slots=True)
class Step:
    """A change of state, and what makes it.

    Attributes:
        start: Column of the state that is left.
        end: Column of the state that is entered.
        words: Lines that say why.
        lift: How far the arc bends: up if positive, down if negative.
    """

    start: int
    end: int
    words: tuple[str, ...]
    lift: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """One row of the picture; the last state is the end."""

    name: str
    about: str
    states: tuple[str, ...]
    steps: tuple[Step, ...]


MACHINES = (
    Machine(
        "Lease",
        "one admission; every transition is one synchronous change of state",
        ("requested", "waiting", "held", "ended"),
        (
            Step(0, 1, ("no capacity, or", "others waiting")),
            Step(1, 2, ("granted by", "a release")),
            Step(2, 3, ("release, once, or", "by the GC")),
            Step(0, 2, ("fits, and the queue is empty",), 44),
            Step(1, 3, ("cancelled, timed out, gate closed",), -56),
            Step(0, 3, ("refused: queue full, too large, gate closed",), -92),
        ),
    ),
    Machine(
        "Start",
        "runs in a task of the registry; at “settled” the lease is always released",
        ("scheduled", "opening", "settled", "ending", "done"),
        (
            Step(0, 1, ("task", "runs")),
            Step(1, 2, ("returned, raised,", "timed out")),
            Step(2, 3, ("session closed:", "END, once")),
            Step(3, 4, ("confirmed, failed", "or timed out")),
            Step(0, 2, ("session closed first: never opened",), 44),
            Step(2, 4, ("nothing was opened: no END",), -56),
        ),
    ),
    Machine(
        "Session",
        "one request; the first close decides its outcome",
        ("open", "starting", "started", "closing", "done"),
        (
            Step(0, 1, ("start",)),
            Step(1, 2, ("all starts", "succeeded")),
            Step(2, 3, ("close: outcome", "set, id free")),
            Step(3, 4, ("END", "confirmed")),
            Step(1, 3, ("closed or cancelled: the start continues",), 44),
            Step(0, 4, ("closed before any start: no END needed",), -56),
        ),
    ),
    Machine(
        "Stream",
        "owns one async iterator; on_close is called once, at “closed”",
        ("new", "running", "idle", "closed"),
        (
            Step(0, 1, ("next item", "requested")),
            Step(1, 2, ("item", "received")),
            Step(2, 3, ("aclose, stop,", "or GC")),
            Step(2, 1, ("next item requested",), 44),
            Step(1, 3, ("end, error, cancellation or deadline",), -56),
            Step(0, 3, ("never started: aclose, stop or GC",), -92),
        ),
    ),
)

_STYLE = """
    .paper { fill: #ffffff }
    text { fill: #1f2933; font-size: 14px }
    .name { font-size: 17px; font-weight: 700 }
    .small { font-size: 12px; fill: #52606d }
    .state { fill: #e4e7eb }
    .end { fill: #1f2933 }
    .state-text { font-weight: 600; text-anchor: middle }
    .on-dark { fill: #ffffff }
    .step { fill: none; stroke: #2186eb; stroke-width: 1.6; marker-end: url(#arrow) }
    .words { font-size: 12px; fill: #334e68; text-anchor: middle }
"""


def main() -> int:
    """Run the command line."""
    drawn = picture()
    if "--check" in sys.argv[1:]:
        return int(not _OUT.exists() or _OUT.read_text() != drawn)
    _OUT.write_text(drawn)
    return 0


def picture() -> str:
    """Return the whole picture."""
    wide = _LEFT * 2 + _COLUMN * 4 + _WIDE
    high = _ROW * len(MACHINES) + 20
    names = ", ".join(machine.name.lower() for machine in MACHINES)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
            f'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" '
            f'role="img" aria-label="State machines of {names}">'
        ),
        f"<style>{_STYLE}</style>",
        (
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 10 5 0 10z" fill="#2186eb"/></marker></defs>'
        ),
        f'<rect class="paper" width="{wide}" height="{high}" rx="10"/>',
    ]
    for row, machine in enumerate(MACHINES):
        parts += _machine(machine, _TOP + row * _ROW)
    return "\n".join([*parts, "</svg>\n"])


def _machine(machine: Machine, top: int) -> list[str]:
    parts = [
        f'<text class="name" x="{_LEFT}" y="{top - 78}">{machine.name}</text>',
        (
            f'<text class="small" x="{_LEFT + 86}" y="{top - 78}">'
            f"{escape(machine.about)}</text>"
        ),
    ]
    for column, state in enumerate(machine.states):
        x, last = _LEFT + column * _COLUMN, column == len(machine.states) - 1
        parts += [
            (
                f'<rect class="{"end" if last else "state"}" x="{x}" y="{top}" '
                f'width="{_WIDE}" height="{_HIGH}" rx="8"/>'
            ),
            (
                f'<text class="state-text{" on-dark" if last else ""}" '
                f'x="{x + _WIDE // 2}" y="{top + 23}">{escape(state)}</text>'
            ),
        ]
    for step in machine.steps:
        parts += _arc(step, top) if step.lift else _straight(step, top)
    return parts


def _straight(step: Step, top: int) -> list[str]:
    start = _LEFT + step.start * _COLUMN + _WIDE
    end = _LEFT + step.end * _COLUMN
    y = top + _HIGH // 2
    return [
        f'<path class="step" d="M{start} {y}H{end}"/>',
        *_words(step.words, (start + end) // 2, y - 6, y + 16),
    ]


def _arc(step: Step, top: int) -> list[str]:
    up = step.lift > 0
    side = 1 if step.end > step.start else -1
    start = _LEFT + step.start * _COLUMN + _WIDE // 2 + 14 * side
    end = _LEFT + step.end * _COLUMN + _WIDE // 2 - 14 * side
    y = top if up else top + _HIGH
    peak = y - step.lift
    bend = 40 * side
    return [
        (
            f'<path class="step" d="M{start} {y}C{start} {peak} {start} {peak} '
            f"{start + bend} {peak}H{end - bend}"
            f'C{end} {peak} {end} {peak} {end} {y}"/>'
        ),
        *_words(step.words, (start + end) // 2, peak - 5, peak - 5),
    ]


def _words(words: tuple[str, ...], x: int, first: int, second: int) -> list[str]:
    return [
        f'<text class="words" x="{x}" y="{y}">{escape(line)}</text>'
        for line, y in zip(words, (first, second), strict=False)
    ]


if __name__ == "__main__":
    sys.exit(main())
