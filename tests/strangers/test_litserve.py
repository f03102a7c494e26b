"""LitServe itself, by the file and the command of docs/howto/servers.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from howto import how_to
from stranger import CLAIMED, Client, Stranger, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("litserve") is None, reason="no LitServe"),
]
STARTED = "Uvicorn running on"
BYTES = 4 * 2**20
# What the page leaves to the user.
API = """
from litserve import LitAPI

class Double(LitAPI):
    def predict(self, request):
        return {"double": 2 * request["number"]}

api = Double()
"""


@contextmanager
def serving(folder: Path, *, guarded: bool = True) -> Iterator[Stranger]:
    """Run the file of the page, with or without the line that is about us."""
    page = how_to("LitServe")
    code = page.code if guarded else page.code.replace("middlewares=[Admission]", "")
    assert code.count(".run()") == 1
    text = API + code.replace(".run()", ".run(port=int(sys.argv[1]))")
    (folder / page.argv[-1]).write_text(f"import sys\n{text}")
    variables = {**page.environment, "LIFECYCLE_BYTES": str(BYTES)}
    with launched(folder, *page.argv, "PORT", **variables) as server:
        assert STARTED in server.until(STARTED), server.said
        yield server


def ask(server: Stranger, number: int, **headers: str) -> Client:
    """Ask for the double of a number."""
    body = json.dumps({"number": number}).encode()
    return server.post("/predict", body, **headers)


@pytest.mark.parametrize("guarded", [True, False])
def test_limits_litserve_and_changes_no_answer(tmp_path: Path, guarded: bool) -> None:
    """The page's file limits it: by itself, LitServe waits for all of any body."""
    with serving(tmp_path, guarded=guarded) as server:
        answer = ask(server, 21).answer()
        assert (answer.status, json.loads(answer.read())) == (200, {"double": 42})
        if not guarded:
            return
        answer = ask(server, 21, **CLAIMED).answer()
        assert answer.status == 413
        assert b"request body is larger than 262144 bytes" in answer.read()
