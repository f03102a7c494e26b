from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lifecycle_engine.scheduling.line import Line


def line_of(*pairs: tuple[str, str]) -> Line[str]:
    """A line of ``(share, key)``."""
    line: Line[str] = Line()
    for share, key in pairs:
        line.join(key, share, key)
    return line


def test_shares_take_turns() -> None:
    """One of each share in turn, each share's own in order."""
    line = line_of(("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"))
    assert [line.take() for _ in range(5)] == ["1", "4", "5", "2", "3"]


def test_flood_of_one_share_delays_another_by_one() -> None:
    """Whoever comes while another share has a hundred in line is next but one."""
    line = line_of(*[("flood", f"f{number}") for number in range(100)])
    line.take()
    line.join("me", "other", "me")
    assert [line.take(), line.take()] == ["f1", "me"]


def test_leave_from_the_middle() -> None:
    """Who leaves is gone; nobody else moves."""
    line = line_of(("a", "1"), ("a", "2"), ("b", "3"), ("a", "4"))
    assert line.leave("2") == "2"
    assert line.leave("2") is None
    assert line.leave("3") == "3"
    assert [line.take(), line.take()] == ["1", "4"]
    assert len(line) == 0


def test_who_comes_back_is_first_of_his_share() -> None:
    """Of his own share's line; the turns of the shares stay as they were."""
    line = line_of(("a", "1"), ("b", "3"), ("a", "2"))
    assert line.shares == ["a", "b"]
    line.rejoin("0", "a", "0")
    line.rejoin("4", "c", "4")
    assert [line.take() for _ in range(len(line))] == ["0", "3", "4", "1", "2"]


def test_share_can_be_taken_out_of_turn() -> None:
    """Its first is taken, and its next turn is after everybody's."""
    line = line_of(("a", "1"), ("b", "2"), ("b", "3"))
    assert line.take("b") == "2"
    assert line.shares == ["a", "b"]
    with pytest.raises(LookupError):
        line.take("c")


def test_same_key_twice_raises() -> None:
    """A key is in line once."""
    line = line_of(("a", "1"))
    with pytest.raises(ValueError, match="in line already"):
        line.join("1", "b", "x")


def test_take_from_nobody_raises() -> None:
    """An empty line has nobody to give."""
    with pytest.raises(LookupError):
        Line().take()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 2)))
)
def test_any_order_of_joins_leaves_and_takes_balances(
    acts: list[tuple[str, int, int]],
) -> None:
    """Whoever joined is in line, in its share's order, until it left or was taken."""
    line: Line[str] = Line()
    waiting: list[tuple[str, str]] = []
    for share, number, act in acts:
        key = f"k{number}"
        if act == 0 and key not in line:
            line.join(key, share, key)
            waiting.append((share, key))
        elif act == 1:
            left = line.leave(key)
            assert (left is None) == (key not in [each for _, each in waiting])
            waiting = [each for each in waiting if each[1] != key]
        elif act == 2 and waiting:
            taken = line.take()
            owner = next(of for of, each in waiting if each == taken)
            assert taken == next(each for of, each in waiting if of == owner)
            waiting.remove((owner, taken))
        assert sorted(line) == sorted(each for _, each in waiting)
        assert len(line) == len(waiting)
