"""What bounds the memory of a server for pictures: gate, scrubbing, or both.

    python benchmarks/memory.py [--clients 128] [--pixels 700000] [--repeat 5]
          [--only halves|gates|clients] [--json FILE] [--plot FILE]

Runs the bundled server and its simulated engine, whose buffers are real, and asks it
for streams about pictures. Per run: the peak of the resident memory of both processes,
above what they had before, and requests a second. Three series:

* halves: payloads kept by both processes until the end of their stream, as a frame or
  a dict that nobody cleans keeps them; let go by the API process alone; by the engine
  alone; by both; and by both behind a gate over bytes.
* gates: the gate off, 1, 2, 4 and 8 payloads wide.
* clients: 16 to 512 of them behind one gate.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_MIB = 2**20
_BYTES_PER_PIXEL = 24
_TOKENS = 48
_EVERY = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One server.

    Attributes:
        name: What the table calls it.
        api: Whether the API process lets go of payloads at hand-off.
        engine: Whether the engine lets go of payloads after prefill.
        gate: Payloads that the gate has room for; 0 is no gate.
        clients: How many ask at a time, once each.
        pixels: Of each picture.
    """

    name: str
    api: bool = True
    engine: bool = True
    gate: int = 0
    clients: int = 128
    pixels: int = 700_000

    @property
    def payload(self) -> int:
        """Bytes of one payload."""
        return self.pixels * _BYTES_PER_PIXEL


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a case took.

    Attributes:
        api: Peak of the API process above its rest, in bytes.
        engine: Peak of the engine process above its rest, in bytes.
        rate: Requests a second.
        failed: Requests that got no whole answer.
    """

    api: int
    engine: int
    rate: float
    failed: int


# The processes under test ------------------------------------------------------------


def serve(case: Case, port: int) -> None:
    """Run the server of *case*; the API process."""
    import uvicorn

    from lifecycle import Gate, Payload
    from lifecycle_engine.app import AppSettings, create_app
    from lifecycle_engine.sim_processor import SimProcessor
    from lifecycle_zmq import ZmqEngine

    class Keeping(ZmqEngine):
        """Keeps each payload until the end of its stream, as uncleaned frames do."""

        def __init__(self, argv: Sequence[str]) -> None:
            super().__init__(argv)
            self._kept: dict[str, Any] = {}

        async def start(
            self, key: str, request: Mapping[str, Any], tensors: Any = None
        ) -> AsyncIterator[Any]:
            value = self._kept[key] = tensors.take()
            return await super().start(key, request, Payload(value))

        async def end(self, key: str) -> None:
            self._kept.pop(key, None)
            await super().end(key)

    argv = [sys.executable, __file__, "--worker", json.dumps(asdict(case))]
    app = create_app(
        (ZmqEngine if case.api else Keeping)(argv),
        SimProcessor(),
        gate=Gate(bytes=case.gate * case.payload or None, name="payloads"),
        settings=AppSettings(model="sim", threads=2),
    )
    uvicorn.run(app, port=port, log_level="warning", timeout_graceful_shutdown=5)


def work(case: Case, rest: list[str]) -> None:
    """Run the engine of *case*; the engine process."""
    from lifecycle_engine.scheduler import Scheduler
    from lifecycle_engine.sim_runner import SimCost, SimRunner
    from lifecycle_zmq import EngineServer

    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options, _ = parser.parse_known_args(rest)
    cost = SimCost(0.0, 0.0, decode_step=0.02, decode_lane=0.0)
    runner = SimRunner(slots=case.clients, max_length=4096, cost=cost)
    if not case.engine:
        runner.keep = ("pixels",)  # nothing is stripped before the stream ends
    EngineServer(
        options.endpoint, Scheduler(runner), incarnation=options.incarnation
    ).run()


# The clients -------------------------------------------------------------------------


def _picture(pixels: int) -> bytes:
    from PIL import Image

    side = int(pixels**0.5)
    out = io.BytesIO()
    Image.new("RGB", (side, pixels // side), (10, 200, 30)).save(out, "PNG")
    return out.getvalue()


def _question(pixels: int) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(_picture(pixels)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": [image]}],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


async def _ask(port: int, body: bytes) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    whole = b"data: [DONE]" in await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return whole


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answer


# One run -----------------------------------------------------------------------------


def _resident(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def _watch(pids: tuple[int, int], peaks: list[int]) -> None:
    while True:
        for i, pid in enumerate(pids):
            with contextlib.suppress(OSError):
                peaks[i] = max(peaks[i], _resident(pid))
        await asyncio.sleep(_EVERY)


async def _ready(port: int, process: asyncio.subprocess.Process) -> int:
    """Wait until *process* serves; return the pid of its engine."""
    async with asyncio.timeout(60):
        while process.returncode is None:
            with contextlib.suppress(OSError):
                if b" 200 OK" in await _get(port, "/ready"):
                    status = (await _get(port, "/_lifecycle/status")).partition(
                        b"\r\n\r\n"
                    )[2]
                    return int(json.loads(status)["engine"]["pid"])
            await asyncio.sleep(0.05)
    raise RuntimeError("the server did not come up")


async def measure(case: Case, port: int) -> Run:
    """Start a server, ask it, and end it."""
    arguments = ["--serve", json.dumps(asdict(case)), "--port", str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)
    try:
        pids = process.pid, await _ready(port, process)
        # Once before, so that what is needed for the first picture is no difference.
        await _ask(port, _question(1000))
        rest = [_resident(pid) for pid in pids]
        peaks = list(rest)
        watching = asyncio.create_task(_watch(pids, peaks))
        body = _question(case.pixels)
        began = time.perf_counter()
        answers = await asyncio.gather(*[_ask(port, body) for _ in range(case.clients)])
        took = time.perf_counter() - began
        watching.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)
    api, engine = (peak - before for peak, before in zip(peaks, rest, strict=True))
    return Run(api, engine, case.clients / took, answers.count(False))


# The series --------------------------------------------------------------------------


def _series(clients: int, pixels: int) -> dict[str, list[Case]]:
    base = Case("", clients=clients, pixels=pixels)
    return {
        "halves": [
            replace(base, name="neither lets go", api=False, engine=False),
            replace(base, name="the API process lets go", engine=False),
            replace(base, name="the engine lets go", api=False),
            replace(base, name="both let go"),
            replace(base, name="both, behind a gate of 4", gate=4),
        ],
        "gates": [replace(base, name="no gate")]
        + [replace(base, name=f"a gate of {n}", gate=n) for n in (1, 2, 4, 8)],
        "clients": [
            replace(base, name=f"{n} clients", gate=4, clients=n)
            for n in (16, 32, 64, 128, 256, 512)
        ],
    }


def _line(case: Case, runs: list[Run]) -> str:
    def spread(values: list[float], digits: int = 0) -> str:
        low, high = min(values), max(values)
        middle = statistics.median(values)
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    cells = [
        spread([run.api / _MIB for run in runs]),
        spread([run.engine / _MIB for run in runs]),
        spread([(run.api + run.engine) / case.payload for run in runs], 1),
        spread([run.rate for run in runs], 1),
        str(sum(run.failed for run in runs)),
    ]
    return f"| {case.name} | {' | '.join(cells)} |"


async def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every series that was asked for, and print it."""
    found: dict[str, Any] = {"clients": options.clients, "pixels": options.pixels}
    series = _series(options.clients, options.pixels)
    for name, cases in series.items():
        if options.only not in (None, name):
            continue
        payload = cases[0].payload / _MIB
        print(f"\n{name}: payloads of {payload:.0f} MiB, {options.clients} clients\n")
        print(
            "| | API process, MiB | engine, MiB | payloads in both | req/s | failed |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        results: dict[str, list[Run]] = {case.name: [] for case in cases}
        # In turns, so that a slow minute of the machine is not one case's.
        for turn in range(options.repeat):
            for case in cases:
                print(f"{name} {turn + 1}: {case.name}", file=sys.stderr)
                results[case.name].append(await measure(case, options.port))
        for case in cases:
            print(_line(case, results[case.name]))
        found[name] = {n: [asdict(run) for run in runs] for n, runs in results.items()}
    return found


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Draw the series as bars of peaks, with the spread of the runs."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    payload = found["pixels"] * _BYTES_PER_PIXEL
    names = [name for name in ("halves", "gates", "clients") if name in found]
    figure, axes = plt.subplots(
        len(names), 1, figsize=(8, 2.9 * len(names)), layout="constrained"
    )
    for axis, name in zip([axes] if len(names) == 1 else axes, names, strict=True):
        for shift, (part, colour) in enumerate(
            (("api", "#2186eb"), ("engine", "#3ebd93"))
        ):
            runs = [
                [run[part] / payload for run in each] for each in found[name].values()
            ]
            middle = [statistics.median(each) for each in runs]
            low = [m - min(each) for m, each in zip(middle, runs, strict=True)]
            high = [max(each) - m for m, each in zip(middle, runs, strict=True)]
            places = [i + 0.4 * shift for i in range(len(runs))]
            label = "API process" if part == "api" else "engine process"
            axis.barh(places, middle, 0.38, xerr=[low, high], color=colour, label=label)
        axis.set_yticks([i + 0.2 for i in range(len(found[name]))], list(found[name]))
        axis.invert_yaxis()
        axis.set_xlabel("peak memory above rest, in payloads")
        axis.legend(loc="lower right", frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--pixels", type=int, default=700_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("halves", "gates", "clients"))
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.serve:
        serve(Case(**json.loads(options.serve)), options.port)
    elif options.worker:
        work(Case(**json.loads(options.worker)), rest)
    else:
        found = asyncio.run(run_all(options))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))
        if options.plot is not None:
            plot(found, options.plot)


if __name__ == "__main__":
    main()
