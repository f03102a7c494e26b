"""Java's own HTTP client, which offers h2c with each request until one is accepted."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from asgi_kit import serving

from lifecycle_asgi.uvicorn_protocol import HeadersOnly
from lifecycle_tools.proxy import Upstream, create_app

JAVA = shutil.which("java")
POST = """
import java.net.URI;
import java.net.http.*;

public class Post {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 2; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .POST(HttpRequest.BodyPublishers.ofString("x".repeat(100000))).build();
            HttpResponse<String> response =
                client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.body());
        }
    }
}
"""


async def count(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the bytes of the body, and the names of the headers that offer."""
    if scope["type"] != "http":
        return
    body, more = 0, True
    while more:
        message = await receive()
        body += len(message.get("body", b""))
        more = message.get("more_body", False)
    offers = {name for name, _ in scope["headers"]} & {b"upgrade", b"http2-settings"}
    text = f"{body} bytes, {len(offers)} offers".encode()
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.mark.thorough
@pytest.mark.skipif(JAVA is None, reason="Java is not installed")
@pytest.mark.parametrize("proxied", [False, True], ids=["server", "proxy"])
@pytest.mark.asyncio
async def test_receives_the_bodies_of_java(proxied: bool, tmp_path: Path) -> None:
    """uvicorn's own class gives an application no byte of them."""
    assert JAVA is not None
    source = tmp_path / "Post.java"
    source.write_text(POST)
    async with asyncio.timeout(120), serving(count, http=HeadersOnly) as behind:
        app = create_app(Upstream(f"http://127.0.0.1:{behind}"), environment={})
        async with serving(app, http=HeadersOnly) as port:
            url = f"http://127.0.0.1:{port if proxied else behind}/"
            client = await asyncio.create_subprocess_exec(
                JAVA, str(source), url, stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await client.communicate()
    assert printed.decode().splitlines() == ["200 100000 bytes, 0 offers"] * 2
