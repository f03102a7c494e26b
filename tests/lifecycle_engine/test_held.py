from __future__ import annotations

from hypothesis import given, strategies as st

from lifecycle_engine.models.held import Held, Picture

# A prompt as pieces: words, or images of one to three tokens each.
IMAGE = 99
pieces = st.lists(
    st.integers(0, 3) | st.tuples(st.integers(1, 3), st.sampled_from([b"a", b"b"])),
    max_size=8,
)


def held(parts: list[int | tuple[int, bytes]]) -> Held:
    """What a prompt of such pieces leaves in a slot."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            count, digest = part
            pictures.append(Picture(len(ids), digest * count))
            ids += [IMAGE] * count
    return Held(ids, pictures)


def told(parts: list[int | tuple[int, bytes]]) -> list[tuple[int, ...]]:
    """Each position by what it was made from, an image's by all of the image."""
    made: list[tuple[int, ...]] = []
    for part in parts:
        if isinstance(part, int):
            made.append((part,))
        else:
            count, digest = part
            made += [(IMAGE, at, *digest, count) for at in range(count)]
    return made


@given(one=pieces, other=pieces, common=pieces)
def test_what_is_shared_was_made_from_the_same(
    one: list[int | tuple[int, bytes]],
    other: list[int | tuple[int, bytes]],
    common: list[int | tuple[int, bytes]],
) -> None:
    """Never a position that differs; never less than the pieces that are the same."""
    left, right = held([*common, *one]), held([*common, *other])
    shared = left.shared(right)
    assert shared == right.shared(left)
    assert told([*common, *one])[:shared] == told([*common, *other])[:shared]
    assert shared >= len(held(common).ids)


def test_another_image_ends_what_is_shared_where_it_begins() -> None:
    """Its tokens are the same ones, its pixels are not."""
    one, other = held([1, (3, b"a"), 2]), held([1, (3, b"b"), 2])
    assert one.shared(one) == 5
    assert one.shared(other) == 1


def test_held_shows_no_content() -> None:
    """Neither tokens nor digests are in its repr."""
    assert repr(held([1, 2, (2, b"a")])) == "Held()"
