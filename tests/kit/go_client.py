"""A client of Go's net/http, built where there is a Go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

SOURCE = """
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

func main() {
	size, _ := strconv.Atoi(os.Args[1])
	ctx, leave := context.WithCancel(context.Background())
	go func() { io.Copy(io.Discard, os.Stdin); leave() }()
	body := bytes.NewReader(make([]byte, size))
	request, err := http.NewRequestWithContext(ctx, "POST", os.Args[2], body)
	if err != nil {
		panic(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if ctx.Err() != nil {
		time.Sleep(time.Hour) // net/http has closed the connection, not our exit
	}
	if err != nil {
		panic(err)
	}
	said, err := io.ReadAll(answer.Body)
	fmt.Printf("%d %s", answer.StatusCode, said)
	if err != nil {
		panic(err)
	}
}
"""


def find_go() -> str:
    """Return the compiler; skips the test without one."""
    return shutil.which("go") or pytest.skip("go is not installed")


async def build(folder: Path) -> str:
    """Return the program, built in *folder*."""
    source, program = folder / "ask.go", folder / "ask"
    await anyio.Path(source).write_text(SOURCE)
    own = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    if not os.environ.keys() & {"HOME", "XDG_CACHE_HOME", "GOCACHE"}:
        own["GOCACHE"] = str(folder / "cache")
    process = await asyncio.create_subprocess_exec(
        *("go", "build", "-o", str(program), str(source)),
        cwd=folder,
        env={**os.environ, **own},
    )
    assert await process.wait() == 0
    return str(program)


@contextlib.asynccontextmanager
async def asking(
    program: str, url: str, size: int
) -> AsyncIterator[tuple[asyncio.Task[str], Process]]:
    """Send a body of *size* bytes; yield what will be answered, and the process.

    The client cancels its request when you close its standard input, and stays.
    """
    process = await asyncio.create_subprocess_exec(
        *(program, str(size), url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    answer = asyncio.create_task(_read(process.stdout))
    try:
        yield answer, process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await answer
        await process.wait()


async def _read(output: asyncio.StreamReader) -> str:
    return (await output.read()).decode()
