"""Every server tells, through the middleware, that a client left (fault-14)."""

from __future__ import annotations

import pytest
import servers
from servers import FORMS, KINDS, ROOT, STACKS, Kind

# For a busy machine; the table has the milliseconds.
WITHIN_S = 2.0
DOCUMENTED = servers.documented(ROOT / "docs" / "reference" / "servers.md")


@pytest.mark.thorough
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_does_what_its_table_says_when_client_leaves(kind: Kind, stack: str) -> None:
    """FIN, RST and half-close; without the middleware, the first of them."""
    if not kind.installed:
        pytest.skip(f"{kind.package} is not installed")
    for form, seen in servers.measure(kind, stack).items():
        assert seen.verdict == DOCUMENTED[kind.name, form, stack], form
        assert max(seen.taken_s, default=0) < WITHIN_S, form


def test_has_table_of_every_server_and_case() -> None:
    """Whatever is tried is in the table, and nothing else; with us, nothing goes on.

    Behind an unread body that is so where the connection can be reached.
    """
    names = [kind.name for kind in KINDS]
    cases = {
        (name, form, stack) for name in names for form in FORMS for stack in STACKS
    }
    assert DOCUMENTED.keys() == cases
    goes_on = {case for case, said in DOCUMENTED.items() if said == servers.GOES_ON}
    with_us = {case for case in goes_on if case[2] != "bare"}
    assert {form for _, form, _ in with_us} == {"unread"}
    assert {name for name, _, stack in with_us if stack != "below"} == {
        "granian",
        "daphne",
    }
