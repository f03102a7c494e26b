"""The allocator of the arena, without any memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lifecycle_zmq.memory.regions import GRANULE, Regions, rounded

PAGES = 24


def test_size_that_is_no_multiple_is_refused() -> None:
    """A range begins and ends at a whole granule, and is not empty."""
    for size in (0, -GRANULE, GRANULE + 1):
        with pytest.raises(ValueError, match=str(size)):
            Regions(size)


@given(st.integers(0, 2**40))
def test_rounded_is_the_least_positive_multiple(nbytes: int) -> None:
    """A region takes whole granules, at least one."""
    cost = rounded(nbytes)
    assert cost % GRANULE == 0
    assert max(nbytes, 1) <= cost < max(nbytes, 1) + GRANULE


def test_lowest_hole_that_fits_is_taken() -> None:
    """Pages that were used before are used first."""
    regions = Regions(8 * GRANULE)
    offsets = [regions.allocate(size * GRANULE) for size in (1, 2, 1, 3)]
    assert offsets == [0, GRANULE, 3 * GRANULE, 4 * GRANULE]
    regions.release(0)
    regions.release(GRANULE * 4)
    assert regions.allocate(2 * GRANULE) == 4 * GRANULE
    assert regions.allocate(GRANULE) == 0


def test_free_twice_or_unknown_is_an_error() -> None:
    """Only a region that is there can be freed, once."""
    regions = Regions(4 * GRANULE)
    offset = regions.allocate(1)
    assert offset == 0
    regions.release(offset)
    for wrong in (offset, GRANULE, -1):
        with pytest.raises(KeyError):
            regions.release(wrong)
    assert (regions.used, regions.longest_hole) == (0, 4 * GRANULE)


class Owners(RuleBasedStateMachine):
    """Beside a list that says of each page whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.regions = Regions(PAGES * GRANULE)
        self.pages: list[int | None] = [None] * PAGES

    def holes(self) -> list[tuple[int, int]]:
        """First page and length of each run of free pages."""
        runs: list[tuple[int, int]] = []
        for page, owner in enumerate(self.pages):
            if owner is not None:
                continue
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        return runs

    @rule(pages=st.integers(0, PAGES + 1), spare=st.integers(0, GRANULE - 1))
    def allocate(self, pages: int, spare: int) -> None:
        """First fit finds what there is, and overlaps nobody."""
        nbytes = pages * GRANULE + spare
        need = rounded(nbytes) // GRANULE
        fitting = [first for first, length in self.holes() if length >= need]
        offset = self.regions.allocate(nbytes)
        if not fitting:
            assert offset is None
            return
        assert offset == fitting[0] * GRANULE
        for page in range(fitting[0], fitting[0] + need):
            assert self.pages[page] is None
            self.pages[page] = offset

    @precondition(lambda self: any(owner is not None for owner in self.pages))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any region may go at any time."""
        owners = sorted({owner for owner in self.pages if owner is not None})
        offset = data.draw(st.sampled_from(owners))
        self.regions.release(offset)
        self.pages = [None if owner == offset else owner for owner in self.pages]

    @rule(offset=st.integers(-1, PAGES * GRANULE), nbytes=st.integers(1, 3 * GRANULE))
    def look(self, offset: int, nbytes: int) -> None:
        """A range belongs to a region only as a whole."""
        first, last = offset // GRANULE, (offset + nbytes - 1) // GRANULE
        owners = set(self.pages[first : last + 1]) if offset >= 0 else {None}
        whole = len(owners) == 1 and last < PAGES
        expected = owners.pop() if whole else None
        assert self.regions.region_of(offset, nbytes) == expected

    @invariant()
    def balance(self) -> None:
        """Free and used are the size, and neighbouring holes are one (`law 3`)."""
        free = sum(owner is None for owner in self.pages)
        assert self.regions.used == (PAGES - free) * GRANULE
        longest = max((length for _, length in self.holes()), default=0)
        assert self.regions.longest_hole == longest * GRANULE
        assert len(self.regions) == len(set(self.pages) - {None})


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
