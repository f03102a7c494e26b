"""The far end of vLLM's engine protocol: it begins every request, and ends none.

vLLM's API server is told that its engine runs elsewhere (``--data-parallel-size-local=0``)
and waits for it, as for one on another machine. As a program, ``vllm_fake_engine.py PORT``
generates as many tokens as each request asks for.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import msgpack
import zmq
from pace import PAUSE, work

TOKEN = 1
# How a request ends that has all its tokens.
LENGTH = 1
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
# Milliseconds between two looks at whether to end.
POLL = 100
# The rank of the engine.
IDENTITY = bytes(2)
# What an engine says of itself; nothing here depends on it.
READY = {
    **dict.fromkeys(("max_model_len", "max_num_batched_tokens"), 2048),
    **dict.fromkeys(("num_gpu_blocks", "block_size", "max_num_seqs"), 16),
    **dict.fromkeys(("world_size", "data_parallel_size", "tensor_parallel_size"), 1),
    **dict.fromkeys(("pipeline_parallel_size", "decode_context_parallel_size"), 1),
    **dict.fromkeys(("data_parallel_rank", "max_loras"), 0),
    **dict.fromkeys(("supports_lora", "enable_sleep_mode"), False),
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": "0.33.0",
    "instance_id": "fake",
}


class Engine:
    """An engine that sends the first token of each request, and no other.

    Args:
        port: Where vLLM waits for engines.
        generates: Whether it sends the others, too.

    Attributes:
        events: ``("add", ID, SERVER)`` and ``("abort", ID, SERVER)``, as they arrive,
            where the last one counts vLLM's API servers.
    """

    def __init__(self, port: int, *, generates: bool = False) -> None:
        self.events: queue.Queue[tuple[str, str, int]] = queue.Queue()
        self._generates = generates
        # How many tokens each request lacks, by its server and its name.
        self._lacks: dict[tuple[int, str], int] = {}
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def close(self) -> None:
        """End, whatever is under way."""
        self._ended.set()
        self._thread.join()

    def _run(self, port: int) -> None:
        handshake = self._socket(zmq.DEALER, f"tcp://127.0.0.1:{port}")
        try:
            self._serve(handshake)
        finally:
            self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IDENTITY, IDENTITY)
        socket.connect(address)
        self._sockets.append(socket)
        return socket

    def _serve(self, handshake: zmq.Socket[bytes]) -> None:
        engine = {"local": False, "headless": True}
        handshake.send(msgpack.packb({"status": "HELLO", **engine}))
        while not handshake.poll(POLL):
            if self._ended.is_set():
                return
        addresses = msgpack.unpackb(handshake.recv())["addresses"]
        servers = [self._socket(zmq.DEALER, each) for each in addresses["inputs"]]
        outputs = [self._socket(zmq.PUSH, each) for each in addresses["outputs"]]
        poller = zmq.Poller()
        for requests in servers:
            requests.send(msgpack.packb(READY))
            poller.register(requests, zmq.POLLIN)
        handshake.send(msgpack.packb({"status": "READY", **engine}))
        due = time.monotonic()
        while not self._ended.is_set():
            pause = int(1000 * PAUSE) if self._lacks else POLL
            for requests, _ in poller.poll(pause):
                kind, head, *_tensors = requests.recv_multipart()
                server = servers.index(requests)
                for output in self._answers(kind, msgpack.unpackb(head), server):
                    outputs[server].send(msgpack.packb(output))
            if self._lacks and time.monotonic() >= due:
                self._generate(outputs)
                due = time.monotonic() + PAUSE

    def _generate(self, outputs: list[zmq.Socket[bytes]]) -> None:
        for server, output in enumerate(outputs):
            tokens = []
            for key in [each for each in self._lacks if each[0] == server]:
                work()
                lacks = self._lacks.pop(key) - 1
                if lacks:
                    self._lacks[key] = lacks
                reason = None if lacks else LENGTH
                tokens.append([key[1], [TOKEN], None, None, None, reason])
            if tokens:
                output.send(msgpack.packb([0, tokens, self._running()]))

    def _running(self) -> dict[str, int]:
        return {"num_running_reqs": len(self._lacks)}

    def _answers(self, kind: bytes, message: Any, server: int) -> list[list[Any]]:
        if kind == ADD:
            self.events.put(("add", message[0], server))
            if self._generates:
                self._lacks[server, message[0]] = message[3]["max_tokens"]
                return []
            return [[0, [[message[0], [TOKEN]]]]]
        if kind == ABORT:
            for each in message:
                self.events.put(("abort", each, server))
                self._lacks.pop((server, each), None)
            return [[0, [], self._running()]]
        if kind == UTILITY:
            _client, call, method, _arguments = message
            result = ["generate"] if method == "get_supported_tasks" else None
            return [[0, [], None, 0.0, [call, None, [None, result]]]]
        return []


if __name__ == "__main__":
    Engine(int(sys.argv[1]), generates=True)
