"""vLLM's own API server on a machine without a GPU: platform plug-in and fake engine.

``peers_vllm_rig.py serve ENGINE ARGS…`` is ``vllm serve ARGS…`` as it is run in each of
several API processes: the real routes, the real rendering and decoding of pictures, the
real `AsyncLLM` and its ZeroMQ client. ``peers_vllm_rig.py engine ENGINE`` is the
engine process at the other end of the sockets. It runs no model: it drops what a
request brought, and generates tokens. ``peers_vllm_rig.py requirements`` prints what
the front end needs of the requirements of the installed wheel.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

# Seconds between two tokens of a request.
STEP = 0.02
TOKEN = 1
_ADD, _ABORT, _UTILITY = b"\x00", b"\x01", b"\x03"
_LENGTH = 1  # FinishReason.LENGTH
_PLUGIN = "peers_vllm_rig:platform"
_LIBRARIES: list[Any] = []
# What only kernels import, and what is installed without its own requirements.
_NOT_NEEDED = """
torch torchaudio torchvision torchcodec PyNvVideoCodec flashinfer-python
tilelang nvidia-cudnn-frontend nvtx fastsafetensors instanttensor
nvidia-cutlass-dsl quack-kernels tokenspeed-mla humming-kernels numba xgrammar
compressed-tensors depyf apache-tvm-ffi opencv-python-headless certifi
"""


def argv(role: str, sockets: Path, *arguments: str) -> list[str]:
    """The command line of a role."""
    return [sys.executable, __file__, role, str(sockets), *arguments]


def platform() -> str:
    """Choose the platform: vLLM's CPU, although the wheel was built for CUDA.

    torchvision from PyPI was built for CUDA, too. It imports beside a torch for CPUs
    if two of its operators, which nothing here calls, are declared before.
    """
    import torch

    if not _LIBRARIES:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(name + schema)
        _LIBRARIES.append(library)
    return "vllm.platforms.cpu.CpuPlatform"


def install_plugin(folder: Path) -> None:
    """Write the metadata by which vLLM finds `platform`; for the ``PYTHONPATH``."""
    metadata = folder / "peers_vllm_rig-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: peers_vllm_rig\nVersion: 0\n")
    entry = f"[vllm.platform_plugins]\npeers = {_PLUGIN}\n"
    (metadata / "entry_points.txt").write_text(entry)


def requirements() -> list[str]:
    """Return what to install beside the wheel, as ``pip`` reads it."""
    from importlib.metadata import requires

    lines = [line for line in requires("vllm") or () if "extra ==" not in line]
    names = [re.split(r"[^\w.-]", line)[0] for line in lines]
    found = zip(names, lines, strict=True)
    return [line for name, line in found if name not in _NOT_NEEDED.split()]


def _addresses(sockets: str) -> dict[str, str]:
    names = ("input", "output")
    return {f"{name}_address": f"ipc://{sockets}/{name}" for name in names}


def serve(sockets: str, arguments: list[str]) -> None:
    """Be an API process of vLLM."""
    import uvloop
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.entrypoints.common.startup import cli_env_setup
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    address, listener = setup_server(args, reuse_port=False)
    client = {**_addresses(sockets), "client_count": 1, "client_index": 0}
    uvloop.run(run_server_worker(address, listener, args, client))


class Engine:
    """The far end of vLLM's engine protocol.

    Args:
        sockets: Folder of the sockets.
    """

    def __init__(self, sockets: str) -> None:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context()
        addresses = _addresses(sockets)
        self._requests = context.socket(zmq.DEALER)
        self._requests.setsockopt(zmq.IDENTITY, bytes(2))  # rank 0
        self._requests.connect(addresses["input_address"])
        self._outputs = context.socket(zmq.PUSH)
        self._outputs.connect(addresses["output_address"])
        self._tokens_left: dict[str, int] = {}

    async def run(self) -> None:
        """Take requests and generate tokens, for ever."""
        await self._requests.send(b"")  # ready
        await asyncio.gather(self._take(), self._generate())

    async def _take(self) -> None:
        import msgspec

        while True:
            kind, head, *_tensors = await self._requests.recv_multipart()
            # Extensions are arrays and slices of tensors, which no model reads here.
            message = msgspec.msgpack.decode(head, ext_hook=lambda _code, _data: None)
            if kind == _ADD:
                self._tokens_left[message[0]] = message[3].get("max_tokens", 16)
            elif kind == _ABORT:
                for request_id in message:
                    self._tokens_left.pop(request_id, None)
            elif kind == _UTILITY:
                _client, call_id, method, _arguments = message
                result = ["generate"] if method == "get_supported_tasks" else None
                await self._send([0, [], None, 0.0, [call_id, None, [None, result]]])

    async def _generate(self) -> None:
        while True:
            await asyncio.sleep(STEP)
            outputs: list[list[Any]] = []
            for request_id, tokens in list(self._tokens_left.items()):
                reason = _LENGTH if tokens <= 1 else None
                outputs.append([request_id, [TOKEN], None, None, None, reason])
                self._tokens_left[request_id] = tokens - 1
                if reason is not None:
                    del self._tokens_left[request_id]
            if outputs:
                await self._send([0, outputs])

    async def _send(self, outputs: list[Any]) -> None:
        import msgspec

        await self._outputs.send(msgspec.msgpack.encode(outputs))


if __name__ == "__main__":
    role, *others = sys.argv[1:]
    if role == "serve":
        serve(others[0], others[1:])
    elif role == "engine":
        asyncio.run(Engine(others[0]).run())
    else:
        print(*requirements(), sep="\n")
