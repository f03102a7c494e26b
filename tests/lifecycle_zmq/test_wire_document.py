"""The page about the wire says what the code does; its own code runs with the docs."""

from __future__ import annotations

import re
from pathlib import Path

from lifecycle_zmq.protocol import items, plain, wire
from lifecycle_zmq.protocol.wire import FROM_CLIENT, Kind

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text()
UNITS = {"KiB": 2**10, "MiB": 2**20}


def rows(width: int) -> list[list[str]]:
    """The rows of all tables of that many columns."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if len(line) == width]


def test_page_lists_every_kind_with_its_limits() -> None:
    """Number, name, sender and both limits of each kind are those of the code."""
    said = {}
    for number, name, sender, size, array in rows(5):
        if number.isdigit():
            count, unit = size.split()
            limits = (int(count) * UNITS[unit], int(array))
            said[int(number), name] = (sender, *limits)
    assert said == {
        (int(kind), kind.name): (
            "client" if kind in FROM_CLIENT else "engine",
            wire.caps_of(kind).body,
            wire.caps_of(kind).array,
        )
        for kind in Kind
    }


def test_page_lists_the_header_byte_by_byte() -> None:
    """Offsets and sizes are those that are packed, and leave no gap."""
    fields = [
        (int(offset), int(size), text)
        for offset, size, text in rows(3)
        if offset.isdigit() and size.isdigit()
    ]
    assert [size for _, size, _ in fields] == [4, 1, 1, 2, 4, 4, 8, 8]
    assert [at for at, _, _ in fields] == [0, 4, 5, 6, 8, 12, 16, 24]
    assert fields[-1][0] + fields[-1][1] == wire.HEADER.size
    assert wire.MAGIC.hex(" ") in fields[0][2]
    assert fields[1][2] == f"version, {wire.VERSION}"


def test_page_lists_the_fields_of_every_kind() -> None:
    """Each field of a map has a row or a sentence in the section of its kind."""
    sections = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    for kind, schema in wire._SCHEMAS.items():
        (section,) = (it for it in sections if f"{kind.name}, {kind}" in it)
        for name in schema:
            assert f"`{name}`" in section


def test_page_names_the_other_limits() -> None:
    """Depth, entries of a map, what an item costs and may take: as in the code."""
    flat = " ".join(PAGE.split())
    for text in (
        f"nesting beyond {plain.MAX_DEPTH} levels",
        f"no map beyond {plain.MAX_MAP} entries",
        f"An item costs {items.BASE_COST} and its bytes",
        f"at most {items.MAX_ITEM // 1024} KiB",
        f"one to {wire.MAX_TENSORS + 1} parts".replace("8", "eight"),
    ):
        assert text in flat
