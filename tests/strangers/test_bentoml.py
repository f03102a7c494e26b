"""BentoML itself, by its own command line, with the lines of the documentation."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from stranger import CLAIMED, Client, Stranger, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bentoml") is None, reason="see make strangers"),
]
BENTOML = str(Path(sys.executable).with_name("bentoml"))
STARTED = "Service Words initialized"
SERVICE = """
import asyncio
import os
from collections.abc import AsyncGenerator

import bentoml
from lifecycle_asgi import Admission
from PIL.Image import Image


@bentoml.service(workers=int(os.environ.get("WORKERS", "1")))
class Words:
    @bentoml.api
    async def whole(self, seconds: float) -> str:
        print("begun", flush=True)
        try:
            await asyncio.sleep(seconds)
        finally:
            print("ended", flush=True)
        return "done"

    @bentoml.api
    async def stream(self, number: int) -> AsyncGenerator[str, None]:
        print("begun", flush=True)
        try:
            for each in range(number):
                await asyncio.sleep(0.01)
                yield f"{each} "
        finally:
            print("ended", flush=True)

    @bentoml.api
    def size(self, image: Image) -> str:
        return str(image.size)


if "BARE" not in os.environ:
    Words.add_asgi_middleware(Admission, release="end")
"""


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[Stranger]:
    """Serve the service."""
    (folder / "service.py").write_text(SERVICE)
    own = {"LIFECYCLE_BYTES": "64MiB", "BENTOML_DO_NOT_TRACK": "True"}
    own |= {"BENTOML_HOME": str(folder / "home"), **environment}
    argv = (BENTOML, "serve", "service:Words", "--port=PORT")
    with launched(folder, *argv, **own) as server:
        assert STARTED in server.until(STARTED)
        yield server


def ask(server: Stranger, api: str, **arguments: object) -> Client:
    """Call an API of the service."""
    return server.post(f"/{api}", json.dumps(arguments).encode())


def upload(server: Stranger) -> bytes:
    """Send a picture in a form; return the answer."""
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "PNG")
    name = 'content-disposition: form-data; name="image"; filename="one.png"'
    kind = "content-type: image/png"
    head, end = f"--x\r\n{name}\r\n{kind}\r\n\r\n", "\r\n--x--\r\n"
    body = head.encode() + file.getvalue() + end.encode()
    form = {"content-type": "multipart/form-data; boundary=x"}
    return server.post("/size", body, **form).answer().read()


def test_guards_bentoml(tmp_path: Path) -> None:
    """It limits, ends what nobody waits for, and changes no answer."""
    answers = []
    for number, environment in enumerate(({}, {"BARE": "1"})):
        (folder := tmp_path / str(number)).mkdir()
        with serving(folder, **environment) as server:
            found = [
                ask(server, "whole", seconds=0.01),
                ask(server, "stream", number=3),
            ]
            answers.append([*(each.answer().read() for each in found), upload(server)])
            if environment:
                continue
            answer = server.post("/whole", b"{}", **CLAIMED).answer()
            assert answer.status == 413
            assert b"The request body is larger than" in answer.read()
            for _ in found:
                server.until("ended")
            for api, long in (
                ("whole", {"seconds": 1e6}),
                ("stream", {"number": 10**9}),
            ):
                client = ask(server, api, **long)
                server.until("begun")
                client.leave()
                assert server.until("ended").endswith("ended\n")
    assert answers[0] == answers[1] == [b"done", b"0 1 2 ", b"(300, 200)"]


def test_bare_goes_on_for_nobody(tmp_path: Path) -> None:
    """Without `Admission`, an answer that is not streamed is worked on to its end."""
    with serving(tmp_path, BARE="1") as server:
        client = ask(server, "whole", seconds=1e6)
        server.until("begun")
        client.leave()
        # Another one that begins and ends later does so first.
        assert ask(server, "whole", seconds=0.5).answer().read() == b"done"
        assert server.until("ended").count("ended\n") == 1


def test_says_that_workers_multiply_the_budget(tmp_path: Path) -> None:
    """The second worker says so, unless they share it."""
    warning = "Admission: 64 MiB for requests in each worker process"
    for name, environment in (("own", {}), ("shared", {"LIFECYCLE_SHARED": "FOLDER"})):
        (folder := tmp_path / name).mkdir()
        shared = {key: str(folder / "shared") for key in environment}
        with serving(folder, WORKERS="2", **shared) as server:
            said = server.until(STARTED)
        assert (warning in said) is (name == "own"), said
