"""A plug-in of SGLang that puts nothing in the place of its engine.

SGLang then starts without a model: its command line, its HTTP server, its tokenizer and
its detokenizer are its own. A line on stdout says what arrives where a scheduler reads.

With the variable `GENERATES`, a process there generates all tokens of each request.
"""

from __future__ import annotations

import array
import multiprocessing
import os
import sys
import threading
import time
from importlib import import_module
from typing import Any

from pace import PAUSE, work

GROUP = "sglang.srt.plugins"
TOKEN = 64


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
        if "GENERATES" in os.environ:
            addresses = address, port_args.detokenizer_ipc_name
            fork = multiprocessing.get_context("fork")
            fork.Process(target=generate, args=addresses, daemon=True).start()
            return engine.SchedulerInitResult(scheduler_infos=[dict(ready)]), []
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


def generate(requests: str, outputs: str) -> None:
    """Send a token of each request at its pace, until it has all or is aborted.

    Args:
        requests: Address where they come.
        outputs: Address of the detokenizer.
    """
    zmq = import_module("zmq")
    messages = import_module("sglang.srt.managers.io_struct")
    context = zmq.Context()
    source, detokenizer = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    source.connect(requests)
    detokenizer.connect(outputs)
    # How many tokens of each request are there, and how many it asked for.
    running: dict[str, tuple[int, int]] = {}
    due = time.monotonic()
    while True:
        while source.poll(1000 * PAUSE if running else None):
            message = messages.sock_recv(source)
            if isinstance(message, messages.TokenizedGenerateReqInput):
                running[message.rid] = (0, message.sampling_params.max_new_tokens)
            if isinstance(message, messages.AbortReq):
                running.pop(message.rid, None)
            if time.monotonic() >= due:
                break
        if running:
            messages.sock_send(detokenizer, tokens(messages, running))
        due = time.monotonic() + PAUSE


def tokens(messages: Any, running: dict[str, tuple[int, int]]) -> Any:
    """Return the next token of each request, and forget those that end with it."""
    ids, counts, reasons = list(running), [], []
    for each in ids:
        work()
        count, asked = running.pop(each)
        count += 1
        counts.append(count)
        reasons.append({"type": "length", "length": count} if count == asked else None)
        if count < asked:
            running[each] = (count, asked)
    fields = messages.BatchTokenIDOutput.__struct_fields__
    zeros, token = [0] * len(ids), array.array("q", [TOKEN])
    known = {
        **dict.fromkeys(("prompt_tokens", "reasoning_tokens", "cached_tokens"), zeros),
        **dict.fromkeys(("read_offsets", "retraction_counts"), zeros),
        **dict.fromkeys(("decode_ids", "output_ids"), [token] * len(ids)),
        **dict.fromkeys(("skip_special_tokens", "no_stop_trim"), [True] * len(ids)),
        "spaces_between_special_tokens": [True] * len(ids),
        "decoded_texts": [""] * len(ids),
        "completion_tokens": counts,
        "finished_reasons": reasons,
        "rids": ids,
    }
    return messages.BatchTokenIDOutput(**dict.fromkeys(fields) | known)


def say_imported(*_args: Any) -> None:
    """Write whether this process has imported SGLang's HTTP server."""
    has = "sglang.srt.entrypoints.http_server" in sys.modules
    print(f"the detokenizer has the HTTP server: {has}", flush=True)
