"""Images by URL: off by default; when on, from public addresses only, within limits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from certificates import certificate
from http_kit import GatedProcessor, Server, data_url, encoded, png, running

from lifecycle import Gate
from lifecycle.testing.simulation import simulate
from lifecycle_engine import (
    ApiError,
    AppSettings,
    FetchLimits,
    HttpsGet,
    MediaLimits,
)
from lifecycle_engine.api.request_body import RemoteImage
from lifecycle_engine.server.remote_images import (
    FetchError,
    RemoteImages,
    connect,
    is_public,
)

pytestmark = pytest.mark.asyncio
HOST, PUBLIC = "pictures.example", "93.184.216.34"
PUBLIC6 = "2606:4700::1111"
OTHER, INSIDE = "other.example", "inside.example"
IMAGE = encoded(64, 48)


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    """An HTTP response."""
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def to(url: str) -> bytes:
    """A redirect."""
    return answer(302, b"", f"location: {url}")


PAGES: dict[str, bytes] = {
    "/image.png": answer(200, IMAGE),
    "/image.png?size=1": answer(200, IMAGE),
    "/chunked": b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(IMAGE), IMAGE),
    "/moved": to("/image.png"),
    "/moved-abroad": to(f"https://{OTHER}/image.png"),
    "/moved-inside": to(f"https://{INSIDE}/image.png"),
    "/moved-to-http": to(f"http://{HOST}/image.png"),
    "/moved-to-loopback": to("https://127.0.0.1/image.png"),
    "/moved-nowhere": to("https://[::1/"),
    "/round": to("/round"),
    "/text": answer(200, b"this is no picture"),
    "/missing": answer(404),
    "/gzip": answer(200, IMAGE, "content-encoding: gzip"),
    "/gzip-too": answer(
        200, IMAGE, "content-encoding: gzip", "content-encoding: identity"
    ),
    "/large": answer(200, b"x" * 30_000),
    "/large-chunked": b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"fff\r\n%b\r\n" % (b"x" * 0xFFF) * 9,
    "/cut": answer(200, IMAGE)[:-5],
    "/other-protocol": b"HTTP/1.1 101 x\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "/garbage": b"hello there\r\n\r\n",
    "/headers": b"HTTP/1.1 200 x\r\n" + b"x-a: %b\r\n" % (b"b" * 90_000) + b"\r\n",
    "/nothing": b"",
}


class Site:
    """A server of pictures at any address, and who was asked for what."""

    def __init__(self, path: Path) -> None:
        self.path, self.port = path, 0
        self.names = {HOST: [PUBLIC], OTHER: [PUBLIC], INSIDE: ["10.0.0.7"]}
        self.connected: list[str] = []
        self.asked: list[str] = []
        self.hosts: list[str] = []

    async def resolve(self, host: str) -> list[str]:
        """What a name server says; a list of several is one for each question."""
        if host not in self.names:
            try:
                ipaddress.ip_address(host)
            except ValueError:
                raise OSError(f"no such name {host}") from None
            return [host]
        return self.names[host]

    async def connect(self, address: str, host: str) -> Any:
        """The connection of production, to this server instead of *address*."""
        self.connected.append(address)
        context = ssl.create_default_context(cafile=str(self.path))
        return await connect("127.0.0.1", host, port=self.port, context=context)

    async def serve(self, reader: Any, writer: Any) -> None:
        """Answer one request."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            self.hosts.append(head.decode().partition("host: ")[2].split()[0])
            if path == "/slow":
                await reader.read()
            writer.write(PAGES.get(path, b""))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        """Serve."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path)
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=context)
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            yield self

    def get(self, **limits: Any) -> HttpsGet:
        """What fetches from it."""
        limits = {"file_bytes": 20_000, "seconds": 120, **limits}
        settings = FetchLimits(**limits)
        return HttpsGet(settings, resolve=self.resolve, connect=self.connect)


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Site:
    """A site whose certificate is for two names, and for no third one."""
    return Site(
        certificate(tmp_path_factory.mktemp("tls"), HOST, OTHER, INSIDE, PUBLIC6)
    )


@pytest.mark.parametrize(
    "path",
    ["/image.png", "/image.png?size=1", "/chunked", "/moved", "/moved-abroad"],
)
async def test_fetches_a_file(site: Site, path: str) -> None:
    """Whole or in chunks, also where it was moved to, from the address it checked."""
    async with asyncio.timeout(120), site.open():
        site.connected.clear()
        assert await site.get()(f"https://{HOST}{path}") == IMAGE
        assert set(site.connected) == {PUBLIC}


async def test_fetches_from_a_literal_address(site: Site) -> None:
    """A public IPv6 address is asked as a name is, and certified as itself."""
    async with asyncio.timeout(120), site.open():
        site.connected.clear()
        assert await site.get()(f"https://[{PUBLIC6}]/image.png") == IMAGE
        assert site.connected == [PUBLIC6]
        assert site.hosts[-1] == f"[{PUBLIC6}]"


REFUSED = {
    f"http://{HOST}/image.png": "not at an https URL",
    f"https://{HOST}:8443/image.png": "of port 443",
    f"https://user:word@{HOST}/image.png": "name or password",
    f"https://{INSIDE}/image.png": "not at a public address",
    "https://127.0.0.1/image.png": "not at a public address",
    "https://169.254.169.254/latest/meta-data": "not at a public address",
    "https://[::1]/image.png": "not at a public address",
    "https://[fd00::1]/image.png": "not at a public address",
    "https://[::ffff:10.0.0.7]/image.png": "not at a public address",
    "https://[::ffff:7f00:1]/image.png": "not at a public address",
    "https://[64:ff9b::10.0.0.7]/image.png": "not at a public address",
    "https://[fe80::1%25eth0]/image.png": "no valid URL",
    "https://[fe80::1%eth0]/image.png": "no valid URL",
    "https://[v1.x]/image.png": "no valid URL",
    "https://2606:4700::1111/image.png": "no valid URL",
    "https://[2606:4700::1111]:8443/image.png": "of port 443",
    "https://unknown.example/x": "could not be fetched",
    "https:///x": "no valid URL",
    "https://a..b/x": "no valid URL",
    "https://" + "a" * 300 + "/x": "no valid URL",
    f"https://{HOST}/\x01": "no valid URL",
    f"https://{HOST}/\u00e9": "no valid URL",
    "https://\x00/": "no valid URL",
    f"https://{HOST}/moved-inside": "not at a public address",
    f"https://{HOST}/moved-to-http": "not at an https URL",
    f"https://{HOST}/moved-to-loopback": "not at a public address",
    f"https://{HOST}/moved-nowhere": "no valid URL",
    f"https://{HOST}/round": "redirects more than 3 times",
    f"https://{HOST}/missing": "status 404",
    f"https://{HOST}/gzip": "is compressed",
    f"https://{HOST}/gzip-too": "is compressed",
    f"https://{HOST}/large": "larger than 20000 bytes",
    f"https://{HOST}/large-chunked": "larger than 20000 bytes",
    f"https://{HOST}/cut": "could not be fetched",
    f"https://{HOST}/other-protocol": "could not be fetched",
    f"https://{HOST}/garbage": "could not be fetched",
    f"https://{HOST}/headers": "could not be fetched",
    f"https://{HOST}/nothing": "could not be fetched",
    "https://third.example/image.png": "could not be fetched",
}


@pytest.mark.parametrize("url", REFUSED, ids=ascii)
async def test_fetches_nothing_else(site: Site, url: str) -> None:
    """Each refusal says why, and no word of the URL."""
    async with asyncio.timeout(120), site.open():
        site.names["third.example"] = [PUBLIC]
        site.connected.clear()
        with pytest.raises(FetchError, match=REFUSED[url]) as caught:
            await site.get()(url)
        assert "example" not in str(caught.value)
        assert set(site.connected) <= {PUBLIC}
        assert caught.value.__context__ is None


async def test_needs_every_address_to_be_public(site: Site) -> None:
    """A name that also has an address inside is refused, whichever comes first."""
    async with asyncio.timeout(120), site.open():
        site.connected.clear()
        for addresses in ([PUBLIC, "10.0.0.1"], ["::1", PUBLIC], []):
            site.names["mixed.example"] = addresses
            with pytest.raises(FetchError, match="public"):
                await site.get()("https://mixed.example/image.png")
        assert site.connected == []


INSIDE_ADDRESSES = [
    "192.0.0.9",
    "192.0.0.192",
    "192.88.99.1",
    "168.63.129.16",
    "3fff::1",
    "3fff:fff::1",
    "5f00::1",
    "2001:1::1",
    "no address",
    "",
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.1.2.3",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:a00:1::",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%1",
    "2606:4700::1111%1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", INSIDE_ADDRESSES)
async def test_knows_addresses_of_ones_own(address: str) -> None:
    """Private, loopback, link-local, shared, reserved, and those in disguise."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        PUBLIC,
        "8.8.8.8",
        "168.63.129.17",
        "2620:fe::fe",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ],
)
async def test_accepts_public_addresses(address: str) -> None:
    """All others."""
    assert is_public(address)


def ask(path: str, *urls: str) -> dict[str, Any]:
    """A request with pictures by URL, in the form of an endpoint."""
    body: dict[str, Any] = {"model": "sim", "max_tokens": 3}
    if path == "/v1/responses":
        items = [{"type": "input_image", "image_url": url} for url in urls]
        return {"model": "sim", "input": [{"role": "user", "content": items}]}
    if path == "/generate":
        return body | {"text": "", "images": list(urls)}
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}}
        if path == "/v1/chat/completions"
        else {"type": "image", "source": {"type": "url", "url": url}}
        for url in urls
    ]
    return body | {"messages": [{"role": "user", "content": parts}]}


PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"]


async def post(server: Server, path: str, body: Any) -> tuple[int, Any]:
    """Status and document."""
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as told:
        return told.status, await told.json()


@contextlib.asynccontextmanager
async def fetching(site: Site, **more: Any) -> AsyncIterator[Server]:
    """A server that fetches from a site."""
    limits = more.pop("limits", {})
    settings = AppSettings(model="sim", fetch=site.get(**limits), **more.pop("app", {}))
    async with (
        asyncio.timeout(120),
        site.open(),
        running(settings=settings, **more) as it,
    ):
        yield it


@pytest.mark.parametrize("path", PATHS)
async def test_refuses_them_by_default(path: str) -> None:
    """Nothing is fetched unless it was switched on."""
    async with asyncio.timeout(120), running() as server:
        body = ask(path, f"https://{HOST}/image.png")
        status, told = await post(server, path, body)
        assert status == 400
        assert "not fetched by this server" in told["error"]["message"]
        await server.quiet()


@pytest.mark.parametrize("path", PATHS)
async def test_answers_as_if_they_had_been_sent(site: Site, path: str) -> None:
    """A picture by URL is the same as by data, among others in its place."""
    other = data_url(png(8, 8))
    async with fetching(site) as server:
        url = f"https://{HOST}/image.png"
        status, by_url = await post(server, path, ask(path, url))
        assert status == 200, by_url
        if path != "/v1/messages":
            sent = ask(path, other, data_url(IMAGE), other)
            named = ask(path, other, url, other)
            _, by_data = await post(server, path, sent)
            _, mixed = await post(server, path, named)
            assert mixed["usage"] == by_data["usage"]
            for name in ("outputs", "choices"):
                assert mixed.get(name) == by_data.get(name)
        await server.quiet()


async def test_says_which_one_and_why(site: Site) -> None:
    """The error names the field, and whether it is no picture, or too large."""
    chat = PATHS[0]
    async with fetching(site, limits={"files": 3}) as server:
        for name, status, code in [
            ("/missing", 400, "remote_image_refused"),
            ("/moved-inside", 400, "remote_image_refused"),
            ("/text", 400, "invalid_image"),
            ("/large", 413, "image_too_large"),
        ]:
            good, bad = f"https://{HOST}/image.png", f"https://{HOST}{name}"
            got, told = await post(server, chat, ask(chat, good, bad))
            assert (got, told["error"]["code"]) == (status, code)
            assert HOST not in str(told)
            assert told["error"]["param"] == "messages[0].content[1].image_url.url"
        many = ask(chat, *[f"https://{HOST}/image.png"] * 4)
        got, told = await post(server, chat, many)
        assert (got, told["error"]["code"]) == (400, "too_many_images")
        await server.quiet()


async def test_says_that_one_is_too_slow(site: Site) -> None:
    """The error names no field: all of a request have one limit."""
    async with fetching(site, limits={"seconds": 0.3}) as server:
        good, slow = f"https://{HOST}/image.png", f"https://{HOST}/slow"
        status, told = await post(server, PATHS[0], ask(PATHS[0], good, slow))
        assert (status, told["error"]["code"]) == (504, "image_timeout")
        assert HOST not in str(told)
        assert told["error"]["param"] is None
        await server.quiet()


@pytest.mark.parametrize("seconds", [0.5, 50.0])
async def test_waits_for_all_of_a_request_together(seconds: float) -> None:
    """The limit is neither each file's own nor another one than was set."""

    async def resolve(_: str) -> list[str]:
        return [PUBLIC]

    async def never(*_: str) -> Any:
        await anyio.sleep_forever()

    async def fetch() -> None:
        images = RemoteImages(
            get=HttpsGet(FetchLimits(seconds=seconds), resolve=resolve, connect=never),
            media=MediaLimits(),
            gate=Gate(bytes=1),
            threads=anyio.CapacityLimiter(1),
        )
        files = [
            RemoteImage(url=f"https://{HOST}/{at}", message=0, part=at, param="here")
            for at in range(8)
        ]
        with pytest.raises(ApiError) as caught:
            await images._fetch_all(files)
        assert (caught.value.status, caught.value.code) == (504, "image_timeout")

    # Virtual time, in which nothing but the limit can end the fetch.
    run = partial(simulate, fetch, order="fifo", early_timers=0)
    assert (await asyncio.to_thread(run)).seconds == pytest.approx(seconds)


async def test_counts_them_like_those_that_were_sent(site: Site) -> None:
    """Pixels of all pictures together are limited, and are charged at the gates."""
    chat, media = PATHS[0], MediaLimits(request_pixels=64 * 48)
    url = f"https://{HOST}/image.png"
    processor = GatedProcessor()
    app = {"media": media}
    async with fetching(site, processor=processor, app=app) as server:
        got, told = await post(server, chat, ask(chat, url, url))
        assert (got, told["error"]["code"]) == (413, "image_too_large")
        body = ask(chat, url)
        asking = asyncio.create_task(post(server, chat, body))
        payloads = server.service.payloads
        [fetched] = [gate for gate in server.service.gates if gate.name == "fetched"]
        await server.until(lambda: payloads.statistics().bytes_in_use)
        assert payloads.statistics().bytes_in_use == len(IMAGE) + 64 * 48 * 39
        assert fetched.statistics().bytes_in_use == len(IMAGE)
        processor.release.set()
        assert (await asking)[0] == 200
        await server.quiet()


async def test_gives_their_bytes_back_at_hand_off(site: Site) -> None:
    """While an answer streams, no gate is charged for the files any more."""
    chat = PATHS[0]
    async with fetching(site) as server:
        body = ask(chat, f"https://{HOST}/image.png")
        body |= {"stream": True, "max_tokens": 3000}
        url = f"http://127.0.0.1:{server.port}{chat}"
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as told:
            await told.content.readany()
            assert server.service.sessions.live()
            gates = {each.name: each.statistics() for each in server.service.gates}
            del gates["payloads"]  # until the engine has read them
            assert "fetched" in gates
            assert not any(each.bytes_in_use for each in gates.values())
        await server.quiet()


async def test_fetches_no_more_than_there_is_room_for(site: Site) -> None:
    """All requests together are limited; the next one waits and delays no other."""
    chat, url = PATHS[0], f"https://{HOST}/image.png"
    limits = {"bytes": 30_000}
    async with fetching(site, limits=limits) as server:
        site.asked.clear()
        body = ask(chat, f"https://{HOST}/slow")
        slow = asyncio.create_task(post(server, chat, body))
        await server.until(lambda: site.asked == ["/slow"])
        next_ = asyncio.create_task(post(server, chat, ask(chat, url)))
        [gate] = [gate for gate in server.service.gates if gate.name == "fetched"]
        await server.until(lambda: gate.statistics().waiting == 1)
        assert (await post(server, chat, ask(chat, data_url(IMAGE))))[0] == 200
        assert site.asked == ["/slow"]
        slow.cancel()
        assert (await next_)[0] == 200
        await server.quiet()


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_stops_fetching_after_the_client_left(site: Site, how: str) -> None:
    """A disconnect or a cancel by id ends the fetch as well."""
    chat = PATHS[0]
    async with fetching(site) as server:
        site.asked.clear()
        body = ask(chat, f"https://{HOST}/slow")
        asking = asyncio.create_task(post(server, chat, body))
        await server.until(lambda: site.asked == ["/slow"])
        if how == "leave":
            asking.cancel()
            await asyncio.wait([asking])
        else:
            [session] = server.service.sessions.live()
            path = f"/v1/requests/{session.id}/cancel"
            assert (await post(server, path, {}))[0] == 200
            assert (await asking)[0] == 499
        await server.quiet()


async def test_takes_base64_only_where_it_is_base64() -> None:
    """The plain endpoint tells base64 from URLs, and refuses what is neither."""
    async with asyncio.timeout(120), running() as server:
        plain = base64.b64encode(IMAGE).decode()
        assert (await post(server, "/generate", ask("/generate", plain)))[0] == 200
        for wrong in ("ftp://x/y", "data:text/plain,x", "????", "javascript:x"):
            got, told = await post(server, "/generate", ask("/generate", wrong))
            assert (got, told["error"]["param"]) == (400, "images[0]")
        await server.quiet()


async def test_reads_the_certificates_of_the_system_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take tens of milliseconds, in which no other request gets on."""
    read = []
    real = ssl.create_default_context

    def counted(**_: Any) -> ssl.SSLContext:
        read.append(1)
        return real()

    async def refuse(*_: Any, ssl_context: ssl.SSLContext, **__: Any) -> Any:
        assert ssl_context.verify_mode is ssl.CERT_REQUIRED
        assert ssl_context.check_hostname
        raise OSError

    async def resolve(_: str) -> list[str]:
        return [PUBLIC]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    monkeypatch.setattr("anyio.connect_tcp", refuse)
    get = HttpsGet(FetchLimits(), resolve=resolve)
    for _ in range(3):
        with pytest.raises(FetchError, match="OSError"):
            await get(f"https://{HOST}/image.png")
    assert len(read) == 1


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_refuses_what_ends_in_the_handshake(how: str) -> None:
    """A server that hangs up is the client's mistake, and not one of ours."""

    async def hang_up(reader: Any, writer: Any) -> None:
        await reader.read(10)
        getattr(writer.transport, how)()

    async def resolve(_: str) -> list[str]:
        return [PUBLIC]

    async def connected(_: str, host: str) -> Any:
        return await connect("127.0.0.1", host, port=port)

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with asyncio.timeout(120), server:
        port = server.sockets[0].getsockname()[1]
        get = HttpsGet(FetchLimits(), resolve=resolve, connect=connected)
        with pytest.raises(FetchError, match="could not be fetched"):
            await get(f"https://{HOST}/image.png")


async def test_waits_for_other_files_no_longer_than_for_its_own(site: Site) -> None:
    """Requests for slow servers would otherwise block every slot."""
    async with fetching(site, limits={"seconds": 0.1}) as server:
        remote = server.service.remote
        with remote.gate.try_admit(bytes=remote.get.limits.bytes):
            body = ask(PATHS[0], f"https://{HOST}/image.png")
            status, told = await post(server, PATHS[0], body)
        assert status == 503
        assert told["error"]["code"] == "server_overloaded"
        await server.quiet()
