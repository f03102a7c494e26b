"""A real nginx in front of a server, where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from ports import free_port

# With master_process off, it is one process and changes no user.
CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/client;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  scgi_temp_path {folder}/scgi;
  uwsgi_temp_path {folder}/uwsgi;
  client_max_body_size 0;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{upstream};
      {directives}
    }}
  }}
}}
"""


def find_nginx() -> str:
    """Return the program; skips the test without one."""
    folders = "/usr/sbin:/usr/local/sbin:/usr/bin"
    found = shutil.which("nginx") or shutil.which("nginx", path=folders)
    return found or pytest.skip("nginx is not installed")


@contextlib.asynccontextmanager
async def nginx(
    folder: Path, upstream: int, directives: str = ""
) -> AsyncIterator[int]:
    """Run nginx in front of a port; yield its own."""
    program = find_nginx()
    port, log = free_port(), folder / "error.log"
    text = CONFIGURATION.format(
        folder=folder, port=port, upstream=upstream, directives=directives
    )
    await anyio.Path(folder / "nginx.conf").write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(program, "-p", str(folder), "-c", str(folder / "nginx.conf")),
        *("-e", str(log)),
    )
    try:
        async with asyncio.timeout(60):
            while not await _listens(port):
                said = await anyio.Path(log).read_text() if log.exists() else ""
                assert process.returncode is None, said
                await asyncio.sleep(0.01)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
