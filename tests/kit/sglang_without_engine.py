"""A plug-in of SGLang that puts nothing in the place of its engine.

SGLang then starts without a model: its command line, its HTTP server, its tokenizer and
its detokenizer are its own. A line on stdout says what arrives where a scheduler reads.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import Any

GROUP = "sglang.srt.plugins"


def register() -> None:
    """Hook what launches schedulers, and what runs in the detokenizer's process."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    launch = "sglang.srt.server_args.ServerArgs.check_server_args"
    hooks.HookRegistry.register(launch, leave_out_schedulers, hooks.HookType.BEFORE)
    detokenizer = "sglang.srt.managers.detokenizer_manager.DetokenizerManager.__init__"
    hooks.HookRegistry.register(detokenizer, say_imported, hooks.HookType.BEFORE)


def leave_out_schedulers(*_args: Any) -> None:
    """Have `Engine` launch no scheduler, as if one were ready."""
    engine = import_module("sglang.srt.entrypoints.engine")
    ready = {"max_req_input_len": 10_000, "max_total_num_tokens": 10_000}

    def launch(server_args: Any, port_args: Any, *args: Any, **options: Any) -> Any:
        del server_args, args, options
        address = port_args.scheduler_input_ipc_name
        threading.Thread(target=say_scheduled, args=(address,), daemon=True).start()
        return engine.SchedulerInitResult(scheduler_infos=[dict(ready)]), []

    engine.Engine._launch_scheduler_processes = staticmethod(launch)


def say_scheduled(address: str) -> None:
    """Write a line for each request that the scheduler gets, and for each abort."""
    zmq = import_module("zmq")
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(address)
    messages = import_module("sglang.srt.managers.io_struct")
    while message := messages.sock_recv(socket):
        if isinstance(message, messages.TokenizedGenerateReqInput):
            print("scheduled", flush=True)
        if isinstance(message, messages.AbortReq):
            print("aborted", flush=True)


def say_imported(*_args: Any) -> None:
    """Write whether this process has imported SGLang's HTTP server."""
    has = "sglang.srt.entrypoints.http_server" in sys.modules
    print(f"the detokenizer has the HTTP server: {has}", flush=True)
