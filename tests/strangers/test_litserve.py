"""LitServe itself, by the file and the command of docs/howto/servers.md."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from howto import how_to
from stranger import CLAIMED, Client, Stranger, launched

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("litserve") is None, reason="no LitServe"),
]
STARTED = "Uvicorn running on"
BYTES = 4 * 2**20
# What the page leaves to the user.
DOUBLE = """
from litserve import LitAPI

class Double(LitAPI):
    def predict(self, request):
        return {"double": 2 * request["number"]}

api = Double()
"""
# Whose work lasts until it is ended, and says so.
ENDLESS = """
import asyncio
import os
import time
from contextlib import contextmanager

from lifecycle import consumer_gone
from litserve import LitAPI, OpenAISpec

@contextmanager
def told(*names):
    names = " ".join(names)
    os.write(1, f"begun {names}\\n".encode())
    try:
        yield
    finally:
        os.write(1, f"ended {names}\\n".encode())

class Stream(LitAPI):
    def predict(self, request):
        with told(request["name"]):
            while True:
                time.sleep(0.01)
                yield request["name"]

    def encode_response(self, output):
        yield from output
        os.write(1, b"encoded all\\n")

class AsyncStream(Stream):
    async def predict(self, request):
        with told(request["name"]):
            while True:
                await asyncio.sleep(0.01)
                yield request["name"]

    async def encode_response(self, output):
        async for item in output:
            yield item
        os.write(1, b"encoded all\\n")

class AsyncPause(AsyncStream):
    async def predict(self, request):
        with told(request["name"]):
            yield request["name"]
            await asyncio.Event().wait()

class AsyncWhole(LitAPI):
    async def predict(self, request):
        with told(request["name"]):
            await asyncio.Event().wait()

class Whole(LitAPI):
    def predict(self, request):
        with told(request["name"]):
            while not consumer_gone():
                time.sleep(0.01)

class Batch(LitAPI):
    def predict(self, requests):
        names = [request["name"] for request in requests]
        with told(*names):
            while True:
                time.sleep(0.01)
                yield names

    def encode_response(self, output):
        yield from output

class Chat(LitAPI):
    def predict(self, request):
        with told(request.messages[-1].content):
            while True:
                time.sleep(0.01)
                yield "word "

api = {api}
"""
# What a wrapper around ``predict`` might lose.
RETURNING = """
from litserve import LitAPI

class Returning(LitAPI):
    def predict(self, request):
        yield "items, "
        return "result"

    def encode_response(self, output):
        yield (yield from output)

api = Returning(stream=True)
"""
SETTING = """
from contextvars import ContextVar
from litserve import LitAPI

variable = ContextVar("variable")

class Setting(LitAPI):
    async def predict(self, request):
        variable.set("set")

    async def encode_response(self, output):
        return variable.get()

api = Setting(enable_async=True)
"""
# Whose loop works on two requests at once, until there is a third.
PAIRS = """
import os
import time
from lifecycle import consumer_gone
from litserve import LitAPI
from litserve.loops import SingleLoop
from litserve.utils import LitAPIStatus, LoopResponseType

REGULAR = LoopResponseType.REGULAR

class Pairs(SingleLoop):
    def run_single_loop(self, lit_api, request_queue, transport, *_):
        pair = []
        while len(pair) < 2:
            queue_id, uid, _, request = request_queue.get()
            self.put_response(transport, queue_id, uid, (), LitAPIStatus.START, REGULAR)
            pair.append((queue_id, uid))
        os.write(1, b"begun pair\\n")
        while request_queue.empty():
            time.sleep(0.01)
        answer = {"gone": lit_api.predict(None)}
        for queue_id, uid in pair:
            self.put_response(
                transport, queue_id, uid, answer, LitAPIStatus.OK, REGULAR
            )
        time.sleep(600)

class Asking(LitAPI):
    def predict(self, _):
        return consumer_gone()

api = Asking(loop=Pairs())
"""
KINDS = {
    "stream": "Stream(stream=True)",
    "async stream": "AsyncStream(stream=True, enable_async=True)",
    "async pause": "AsyncPause(stream=True, enable_async=True)",
    "async whole": "AsyncWhole(enable_async=True)",
    "whole": "Whole()",
    "batch": "Batch(stream=True, max_batch_size=2, batch_timeout=0.1)",
    "chat": "Chat(spec=OpenAISpec())",
}


@contextmanager
def serving(
    folder: Path,
    api: str = DOUBLE,
    options: str = "",
    *,
    guarded: bool = True,
    run: str = "",
) -> Iterator[Stranger]:
    """Run the file of the page, with our class or LitServe's own."""
    page = how_to("LitServe")
    ours = "from lifecycle_asgi.litserve_plugin import LitServer"
    assert page.code.count(ours) == page.code.count("(api)") == 1
    assert page.code.count(".run()") == 1
    code = page.code if guarded else page.code.replace(ours, "from litserve import *")
    code = code.replace("(api)", f"(api, {options})")
    code = code.replace(".run()", f".run({run}port=int(sys.argv[1]))")
    (folder / page.argv[-1]).write_text(f"import sys\n{api}\n{code}")
    variables = {**page.environment, "LIFECYCLE_BYTES": str(BYTES)}
    with launched(folder, *page.argv, "PORT", **variables) as it:
        assert STARTED in it.until(STARTED), it.said
        yield it


def ask(server: Stranger, number: int, **headers: str) -> Client:
    """Ask for the double of a number."""
    body = json.dumps({"number": number}).encode()
    return server.post("/predict", body, **headers)


def begin(server: Stranger, name: str, kind: str = "stream") -> Client:
    """Ask for what does not end, under a name."""
    if kind == "chat":
        message = {"role": "user", "content": name}
        body = {"model": "lit", "stream": True, "messages": [message]}
        return server.post("/v1/chat/completions", json.dumps(body).encode())
    return server.post("/predict", json.dumps({"name": name}).encode())


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, "") for kind in KINDS), ("stream", "fast_queue=True")],
)
def test_ends_work_of_who_has_left(tmp_path: Path, kind: str, options: str) -> None:
    """Their ``finally`` has run, and the only worker serves the next."""
    api = ENDLESS.replace("{api}", KINDS[kind])
    with serving(tmp_path, api, options) as server:
        for name in ("first", "second"):
            client = begin(server, name, kind)
            assert f"begun {name}" in server.until(f"begun {name}")
            client.leave()
            said = server.until(f"ended {name}")
            assert f"ended {name}" in said
            assert "encoded all" not in said


def test_begins_nothing_for_who_left_the_queue(tmp_path: Path) -> None:
    """The one that waits behind them is served, and they never."""
    api = ENDLESS.replace("{api}", KINDS["stream"])
    with serving(tmp_path, api) as server:
        first = begin(server, "first")
        server.until("begun first")
        leaver = begin(server, "leaver")
        last = begin(server, "last")
        leaver.leave()
        # Their ends are noticed in order.
        ask(server, 1, **CLAIMED).answer().read()
        first.leave()
        said = server.until("begun last")
        assert "begun last" in said
        assert "leaver" not in said
        assert last.answer().read(4) == b"last"


def test_ends_a_batch_with_its_last_client(tmp_path: Path) -> None:
    """Not with its first."""
    # Which waits for both.
    batch = "Batch(stream=True, max_batch_size=2, batch_timeout=600)"
    api = ENDLESS.replace("{api}", batch)
    with serving(tmp_path, api, "timeout=False") as server:
        clients = {name: begin(server, name) for name in ("one", "two")}
        said = server.until("begun")
        assert "one" in said
        assert "two" in said
        clients["one"].leave()
        answer = clients["two"].answer()
        assert answer.read(300) == b"two" * 100
        clients["two"].leave()
        assert "ended" in server.until("ended")


@pytest.mark.parametrize(
    ("api", "expected"),
    [(RETURNING, b"items, result"), (SETTING, b'"set"')],
    ids=["returning", "setting"],
)
def test_hands_on_what_predict_does(tmp_path: Path, api: str, expected: bytes) -> None:
    """Its result, where it is a generator, and the context, where it is a coroutine."""
    with serving(tmp_path, api) as server:
        assert ask(server, 1).answer().read() == expected


def test_tells_a_loop_of_the_users_own_of_no_leaver(tmp_path: Path) -> None:
    """For all we know it works for others, too; and its queue is a whole queue."""
    with serving(tmp_path, PAIRS) as server:
        stays = ask(server, 1)
        leaver = ask(server, 2)
        assert "begun pair" in server.until("begun pair")
        leaver.leave()
        ask(server, 3, **CLAIMED).answer().read()  # their ends are noticed in order
        ask(server, 4)
        assert json.loads(stays.answer().read()) == {"gone": False}
        assert "Pairs works on for clients that left" in "".join(server.said)


def test_leaves_litserves_own_limit_on_bodies(tmp_path: Path) -> None:
    """Inside of which nobody reads them before."""
    with serving(tmp_path, options="max_payload_size=1000") as server:
        body = json.dumps({"number": 1, "padding": "-" * 1000}).encode()
        answer = server.post("/predict", body).answer()
        assert (answer.status, answer.read()) == (
            413,
            b'{"detail":"Payload too large"}',
        )


def test_takes_arguments_by_position() -> None:
    """All that there are."""
    import litserve

    from lifecycle_asgi.litserve_plugin import LitServer

    parameters = inspect.signature(litserve.LitServer).parameters.values()
    others = [each.default for each in parameters][1:]
    server = LitServer(litserve.LitAPI(), *others)
    assert server.timeout == 30


def test_forgets_no_leaver_of_thousands() -> None:
    """Many may leave at once, and a queue may be long."""
    from lifecycle_asgi.litserve_plugin import _Left

    left = _Left()
    for uid in range(10_000):
        left.add(uid)
    assert [uid for uid in range(10_001) if uid not in left] == [10_000]


def test_drops_answers_to_who_has_left() -> None:
    """LitServe 0.2.17 would raise for them, and answer nobody after that."""
    import litserve

    from lifecycle_asgi.litserve_plugin import LitServer

    server = LitServer(litserve.LitAPI())
    queue = server.response_buffer["who has left"].response_queue
    assert queue is not None
    queue.append("an item")
    assert not server.response_buffer


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_says_that_each_of_several_servers_has_the_bytes(
    tmp_path: Path, kind: str
) -> None:
    """The first of them does not know of the others."""
    api = ENDLESS.replace("{api}", KINDS["stream"])
    run = f"num_api_servers=2, api_server_worker_type={kind!r}, "
    with serving(tmp_path, api, run=run) as server:
        assert "in each worker process" in server.until("in each worker process")


@pytest.mark.slow
def test_litserve_itself_works_on(tmp_path: Path) -> None:
    """Its only worker does not serve the next, whose client waits for three seconds."""
    api = ENDLESS.replace("{api}", KINDS["stream"])
    with serving(tmp_path, api, guarded=False) as server:
        first = begin(server, "first")
        server.until("begun first")
        first.leave()
        second = begin(server, "second")
        second.socket.settimeout(3)
        with pytest.raises(TimeoutError):
            second.answer().read(6)
        assert not [line for line in server.said if "ended" in line]


@pytest.mark.parametrize("other", ["arguments", "no start"])
def test_refuses_a_version_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Nothing would end there: it says so instead."""
    from litserve.loops.base import LitLoop
    from litserve.utils import LitAPIStatus

    from lifecycle_asgi.litserve_plugin import LitServer

    if other == "arguments":
        monkeypatch.setattr(LitLoop, "put_response", lambda self, message: None)
    else:  # as in 0.2.16
        monkeypatch.delattr(LitAPIStatus, "START")
    with pytest.raises(SystemExit, match="unknown to this plug-in; install litserve"):
        LitServer(None)
