"""Small SVG charts; the same figures always give the same file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

BLUE, GREEN, AMBER, RED, GREY = "#2186eb", "#3ebd93", "#f0b429", "#d64545", "#9aa5b1"
Point = tuple[float, float]
Scale = Callable[[float], float]

_STYLE = """
    .paper { fill: #ffffff }
    text { fill: #1f2933; font-size: 12px }
    .name { font-size: 15px; font-weight: 700 }
    .small { fill: #52606d }
    .end { text-anchor: end } .middle { text-anchor: middle }
    .rule { stroke: #e4e7eb; stroke-width: 1 }
    .limit { stroke: #d64545; stroke-width: 1.5; stroke-dasharray: 5 4 }
    .line { fill: none; stroke-width: 2; stroke-linejoin: round }
    .spread { stroke: #1f2933; stroke-width: 1.3 }
"""


def picture(wide: int, high: int, label: str, parts: Iterable[str]) -> str:
    """Return the whole SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        f'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" '
        f'role="img" aria-label="{escape(label)}">'
    )
    paper = f'<rect class="paper" width="{wide}" height="{high}" rx="10"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", paper, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "", colour: str = "") -> str:
    """Return a line of text."""
    style = f' style="fill: {colour}"' if colour else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{style}>{escape(words)}</text>'


def linear(least: float, most: float, start: float, end: float) -> Scale:
    """Return a linear scale from figures to coordinates."""
    return lambda value: start + (value - least) / (most - least) * (end - start)


def ticks(most: float) -> list[float]:
    """Return three to six round tick values from 0 to *most* or slightly more."""
    step = 1.0
    while step * 5 < most:
        step *= 10
    while step * 3 > most:
        step /= 10
    step *= next(times for times in (1, 2, 5, 10, 20) if step * times * 5 >= most)
    count = -int(-most // step)
    return [step * number for number in range(count + 1)]


class Panel:
    """One chart and its area.

    Args:
        x: Of its left edge, in the picture.
        y: Of its upper edge, titles included.
        wide: With what is written beside it.
        high: With what is written above and below it.
        left: Room for what is written beside it.

    Attributes:
        parts: What was drawn so far.
        left: Where the figures begin.
        right: Where they end.
        top: Where they end at most.
        foot: Where they are zero.
    """

    def __init__(self, x: float, y: float, wide: float, high: float, left: float = 44):
        self.parts: list[str] = []
        self.left, self.right = x + left, x + wide - 12
        self.top, self.foot = y + 56, y + high - 34
        self._edge = x

    def titles(self, name: str, about: str) -> None:
        """Write the title and the subtitle."""
        self.parts += [
            text(self._edge, self.top - 40, name, "name"),
            text(self._edge, self.top - 22, about, "small"),
        ]

    def heights(self, figures: Sequence[float], unit: str) -> Scale:
        """Draw grid lines for *figures*; return the vertical scale."""
        scale = linear(0, figures[-1], self.foot, self.top)
        for figure in figures:
            y = scale(figure)
            words = f"{figure:g}{unit if figure == figures[-1] else ''}"
            self._rule(self.left, y, self.right, y)
            self.parts.append(text(self.left - 6, y + 4, words, "small end"))
        return scale

    def widths(self, figures: Sequence[float], unit: str) -> Scale:
        """Draw vertical grid lines; return the horizontal scale."""
        scale = linear(0, figures[-1], self.left, self.right)
        for figure in figures:
            x = scale(figure)
            words = f"{figure:g}{unit if figure == figures[-1] else ''}"
            self._rule(x, self.top, x, self.foot)
            self.parts.append(text(x, self.foot + 16, words, "small middle"))
        return scale

    def steps(self, names: Sequence[str], about: str) -> list[float]:
        """Write evenly spaced labels below; return their positions."""
        span = (self.right - self.left) / len(names)
        places = [self.left + span * (i + 0.5) for i in range(len(names))]
        for place, name in zip(places, names, strict=True):
            self.parts.append(text(place, self.foot + 16, name, "small middle"))
        middle = (self.left + self.right) / 2
        self.parts.append(text(middle, self.foot + 31, about, "small middle"))
        return places

    def line(self, points: Iterable[Point], colour: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        """Draw a point."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')

    def bar(self, x: float, y: float, wide: float, high: float, colour: str) -> None:
        """Draw a bar."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            f'rx="2" fill="{colour}"/>'
        )

    def limit(self, y: float, words: str) -> None:
        """Draw a limit line with its label."""
        self.parts += [
            f'<path class="limit" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>',
            text(self.right, y + 16, words, "end", RED),
        ]

    def upright(self, x: float, low: float, high: float) -> None:
        """Draw the range of the runs of one case."""
        self.parts.append(
            f'<path class="spread" d="M{x:.1f} {low:.1f}V{high:.1f}'
            f'M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"/>'
        )

    def across(self, y: float, low: float, high: float) -> None:
        """Draw a horizontal range."""
        self.parts.append(
            f'<path class="spread" d="M{low:.1f} {y:.1f}H{high:.1f}'
            f'M{low:.1f} {y - 4:.1f}v8M{high:.1f} {y - 4:.1f}v8"/>'
        )

    def _rule(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<path class="rule" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
        )


def key(x: float, y: float, names: Iterable[tuple[str, str]]) -> list[str]:
    """Return the legend, in a row."""
    parts = []
    for name, colour in names:
        parts += [
            f'<circle cx="{x + 6:.1f}" cy="{y - 4:.1f}" r="5" fill="{colour}"/>',
            text(x + 18, y, name, "small"),
        ]
        x += 34 + 6.4 * len(name)
    return parts
