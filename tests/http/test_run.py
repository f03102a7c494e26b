"""What `serve.run` changes of its process, and for how long."""

from __future__ import annotations

import json
import subprocess
import sys

from http_kit import ENV

from lifecycle_engine.app import AppSettings

SCRIPT = """
import gc, json, os, signal, sys

def now():
    handlers = [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    return [sys.getswitchinterval(), gc.get_freeze_count() > 10_000, handlers]

told = [now()]
from lifecycle import Gate
from lifecycle_engine.app import create_app
from lifecycle_engine.chats.sim_processor import SimProcessor
from lifecycle_engine.http import serve
from lifecycle_zmq import ZmqEngine

work = [sys.executable, "-m", "lifecycle_engine.worker", "--runner", "sim"]
app = create_app(ZmqEngine(work), SimProcessor(), gate=Gate(name="payloads"))
told.append(now())

def ready(address):
    told.append(now())
    os.kill(os.getpid(), signal.SIGTERM)

serve.run(app, host="127.0.0.1", port=0, announce=ready)
told.append(now())
from PIL import Image
told.append(Image.core.get_blocks_max())
print(json.dumps(told))
"""


def test_changes_its_process_only_while_it_serves() -> None:
    """An application that is made, or was served, leaves all as it was, but memory."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=ENV,
        capture_output=True,
        check=True,
        timeout=60,
    )
    before, made, serving, after, blocks = json.loads(done.stdout)
    assert before == made == after
    assert serving[0] < before[0]
    assert serving[1]
    assert serving[2] != before[2]
    assert blocks == AppSettings().threads  # pages that one picture after another gets
