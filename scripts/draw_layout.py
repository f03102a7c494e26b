"""Draw the modules of each package by what they import: docs/layout.svg.

A module stands above everything that it imports, so every line leads down. The height
of a module is the longest chain of imports below it; a row that is too long for the
picture is broken. An import that a chain of other imports implies has no line.

    python scripts/draw_layout.py            # write the picture
    python scripts/draw_layout.py --check    # fail if it is not up to date
"""

from __future__ import annotations

import ast
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "layout.svg"
WIDTH, ROW, BOX, GAP, MARGIN = 1180, 46, 24, 10, 16
CHARACTER = 6.7
COLOURS = {
    "lifecycle": "#dbeafe",
    "lifecycle_asgi": "#dcfce7",
    "lifecycle_zmq": "#fef3c7",
    "lifecycle_engine": "#fce7f3",
}

MODULES = {
    ".".join(path.relative_to(top).with_suffix("").parts): path
    for top in (ROOT / "src", ROOT / "adapters")
    for path in sorted(top.rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}


def imports(module: str) -> Iterator[str]:
    """Yield the modules of ours that *module* imports."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            inner = [f"{name}.{alias.name}" for alias in node.names]
            yield from (each for each in (name, *inner) if each in MODULES)


GRAPH = {module: {*imports(module)} - {module} for module in MODULES}


@cache
def height(module: str) -> int:
    """Return the longest chain of imports below *module*, inside its package."""
    top = module.partition(".")[0]
    below = [each for each in GRAPH[module] if each.partition(".")[0] == top]
    return 1 + max(map(height, below), default=-1)


@cache
def below(module: str) -> frozenset[str]:
    """Return all modules that *module* imports, directly or through others."""
    found = set(GRAPH[module])
    for each in GRAPH[module]:
        found |= below(each)
    return frozenset(found)


def place(modules: list[str], y: float) -> tuple[dict[str, tuple[float, float]], float]:
    """Return the place of each module, and the end of the drawing."""
    rows: dict[int, list[str]] = defaultdict(list)
    for module in modules:
        rows[height(module)].append(module)
    places: dict[str, tuple[float, float]] = {}
    for level in sorted(rows, reverse=True):
        for line in break_row(sorted(rows[level])):
            x = (WIDTH - length(line)) / 2
            for module in line:
                places[module] = x, y
                x += width(module) + GAP
            y += ROW
    return places, y


def break_row(names: list[str]) -> Iterator[list[str]]:
    """Yield the lines, about as long as one another, that a row needs to fit."""
    lines = math.ceil(length(names) / (WIDTH - 6 * MARGIN))
    most = math.ceil(len(names) / lines)
    yield from (names[i : i + most] for i in range(0, len(names), most))


def length(names: list[str]) -> float:
    """Return the length of a line of boxes."""
    return math.fsum(map(width, names)) + GAP * (len(names) - 1)


def width(module: str) -> float:
    """Return the width of a module's box."""
    return CHARACTER * len(label(module)) + 14


def label(module: str) -> str:
    """Return the path of a module inside its package."""
    return module.partition(".")[2].replace(".", "/") + ".py"


def draw_package(name: str, y: float) -> tuple[list[str], float]:
    """Return the SVG of one package, and where it ends."""
    modules = [module for module in MODULES if module.partition(".")[0] == name]
    shown = [f'<text x="{MARGIN}" y="{y + 16}" class="package">{name}</text>']
    places, end = place(modules, y + 28)
    for module, (x, top) in places.items():
        implied = {far for near in GRAPH[module] for far in below(near)}
        for target in sorted((GRAPH[module] - implied) & places.keys()):
            x2, top2 = places[target]
            shown.append(
                f'<line x1="{x + width(module) / 2:.0f}" y1="{top + BOX:.0f}" '
                f'x2="{x2 + width(target) / 2:.0f}" y2="{top2:.0f}"/>'
            )
    for module, (x, top) in places.items():
        shown.append(
            f'<rect x="{x:.0f}" y="{top:.0f}" width="{width(module):.0f}" '
            f'height="{BOX}" rx="4" fill="{COLOURS[name]}"/>'
            f'<text x="{x + 7:.0f}" y="{top + 16:.0f}">{escape(label(module))}</text>'
        )
    return shown, end + 8


def draw() -> str:
    """Return the picture."""
    shown: list[str] = []
    y = 8.0
    for name in reversed(COLOURS):
        part, y = draw_package(name, y)
        shown += part
    style = (
        "text{font:11px monospace;fill:#1f2937}"
        ".package{font:bold 14px sans-serif}"
        "line{stroke:#9ca3af;stroke-width:.6}rect{stroke:#6b7280;stroke-width:.6}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" '
        'role="img"><title>The modules of each package and what they import</title>'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *shown, "</svg>", ""])


def main() -> None:
    """Write the picture, or check it."""
    if "--check" not in sys.argv:
        PICTURE.write_text(draw())
        print(PICTURE.relative_to(ROOT))
    elif PICTURE.read_text() != draw():
        sys.exit("docs/layout.svg is out of date: run python scripts/draw_layout.py")


if __name__ == "__main__":
    main()
