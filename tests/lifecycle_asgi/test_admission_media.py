"""Admission of media: priced by their headers, one request at a time if need be."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import re
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import httpx
import pytest
from asgi_kit import ScriptedServer, http_scope, serving
from fastapi import FastAPI, Request
from PIL import Image

from lifecycle_asgi import (
    Admission,
    MediaProfile,
    estimate,
    find_media,
    handed_off,
    media_profile,
)
from lifecycle_asgi.media import KIND_BY_FIELD, KIND_BY_TYPE

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
OK = {"type": "http.response.start", "status": 200, "headers": []}
# One byte for each pixel of work, and two of tensors: easy to add up.
PLAIN = MediaProfile(
    work_bytes_per_pixel=1,
    tensor_bytes_per_pixel=2,
    image_pixels=1_000_000,
    assumed_pixels=100_000,
)


def picture(width: int, height: int, kind: str = "PNG", **save: Any) -> bytes:
    """An image file."""
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, kind, **save)
    return out.getvalue()


def data_url(file: bytes, kind: str = "png") -> str:
    """*file* as clients send it."""
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chat(*urls: str) -> dict[str, Any]:
    """A request of OpenAI's chat completions."""
    parts: list[Any] = [{"type": "text", "text": "what is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


def responses(url: str) -> dict[str, Any]:
    """A request of OpenAI's responses."""
    part = {"type": "input_image", "image_url": url}
    return {"model": "m", "input": [{"role": "user", "content": [part]}]}


def messages(file: bytes) -> dict[str, Any]:
    """A request of Anthropic's messages."""
    data = base64.b64encode(file).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    part = {"type": "image", "source": source}
    return {"model": "m", "messages": [{"role": "user", "content": [part]}]}


def priced(
    body: bytes,
    content_type: bytes = b"application/json",
    headers: Sequence[tuple[bytes, bytes]] = (),
    **environment: str,
) -> int:
    """The bytes that `Admission` charges for the media in a body."""
    charged = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        charged.append(admission.statistics()["requests"].bytes_in_use)

    async def ask() -> None:
        declared = [(b"content-type", content_type), *headers]
        declared += [(b"content-length", str(len(body)).encode())]
        server = ScriptedServer(body)
        await admission(http_scope(headers=declared), server.receive, server.send)

    admission = Admission(app, environment=environment, profile=PLAIN)
    anyio.run(ask)
    return max(charged[0] - 3 * len(body), 0)


FILE = picture(200, 100)
BODIES = {
    "chat": chat(data_url(FILE)),
    "responses": responses(data_url(FILE)),
    "messages": messages(FILE),
}


@pytest.mark.parametrize("name", BODIES)
def test_prices_images_of_every_api(name: str) -> None:
    """Each API's image counts by its file and the pixels in its header."""
    encoded = priced(json.dumps(BODIES[name]).encode()) - 60_000
    assert len(FILE) <= encoded <= 2 * len(FILE)
    assert not estimate(BODIES[name], PLAIN).assumed


@pytest.mark.parametrize(("pixels", "saved"), [(10**6, 0), (5_000, 2 * 15_000)])
def test_prices_tensors_by_the_pixels_that_the_model_scales_to(
    pixels: int, saved: int
) -> None:
    """``LIFECYCLE_TENSOR_PIXELS`` caps the tensors, and not the decoded image."""
    body = json.dumps(BODIES["chat"]).encode()
    capped = priced(body, LIFECYCLE_TENSOR_PIXELS=str(pixels))
    assert priced(body) - capped == saved


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_prices_large_files_by_their_beginning(kind: str) -> None:
    """The size of a large file is found, in every format."""
    noise = Image.effect_noise((900, 700), 90).convert("RGB")
    out = io.BytesIO()
    noise.save(out, kind)
    found = estimate(chat(data_url(out.getvalue(), kind.lower())), PLAIN)
    assert found.tensors == 2 * 630_000
    assert found.assumed == 0


def test_decodes_only_the_beginning_of_a_large_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size of a PNG is in its first bytes, and the rest stays as it came."""
    decoded = 0
    plain = binascii.a2b_base64

    def decode(text: bytes) -> bytes:
        nonlocal decoded
        decoded += len(text)
        return plain(text)

    url = data_url(picture(300, 300) + bytes(2**20))
    monkeypatch.setattr(binascii, "a2b_base64", decode)
    assert estimate(chat(url), PLAIN).tensors == 2 * 90_000
    assert decoded == 2**18


@pytest.mark.parametrize(
    "url",
    ["https://example.org/a.png", "data:image/png,raw", "data:image/png;base64,AA"],
)
def test_assumes_what_it_cannot_read(url: str) -> None:
    """An image that is elsewhere, or is none, counts as the profile says."""
    found = estimate(chat(url), PLAIN)
    assert found.tensors == 200_000
    assert found.assumed == found.total


def claiming(width: int, height: int) -> bytes:
    """A PNG of one pixel whose header says that it is larger."""
    file = picture(1, 1)
    head = b"IHDR" + struct.pack(">II", width, height) + file[24:29]
    return file[:12] + head + struct.pack(">I", zlib.crc32(head)) + file[33:]


@pytest.mark.parametrize("size", [(20_000, 20_000), (1, 30_000)])
def test_charges_bombs_and_thin_images_as_the_largest(size: Any) -> None:
    """An image that Pillow refuses costs no more than the largest that is served."""
    found = estimate(chat(data_url(claiming(*size))), PLAIN)
    assert found.tensors == 2 * PLAIN.image_pixels


def test_prices_forms_and_files() -> None:
    """A form counts by its parts, and a body that is an image as that."""
    form = b"\r\n".join(
        [
            b"--xyz",
            b'Content-Disposition: form-data; name="model"',
            b"",
            b"m",
            b"--xyz",
            b'Content-Disposition: form-data; name="image"; filename="a.png"',
            b"Content-Type: image/png",
            b"",
            FILE,
            b"--xyz--",
            b"",
        ]
    )
    for body, kind in (
        (form, b"multipart/form-data; boundary=xyz"),
        (FILE, b"image/png"),
    ):
        assert priced(body, kind) == len(FILE) + 60_000


def form_of(file: bytes, *lines: bytes) -> bytes:
    """A form of one part."""
    return b"\r\n".join([b"--xyz", *lines, b"", file, b"--xyz--", b""])


UNTYPED = b'Content-Disposition: form-data; name="image"; filename="a"'


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("stated", [b"", b"application/octet-stream", b"text/plain"])
def test_prices_files_of_a_form_by_their_first_bytes(kind: str, stated: bytes) -> None:
    """A client that gives no type, or a wrong one, pays the same."""
    file = picture(200, 100, kind)
    form = b"multipart/form-data; boundary=xyz"
    right = form_of(file, UNTYPED, b"Content-Type: image/" + kind.lower().encode())
    lines = [b"Content-Type: " + stated] if stated else []
    assert priced(form_of(file, UNTYPED, *lines), form) == priced(right, form)
    assert priced(right, form) > 0


@pytest.mark.parametrize(
    ("start", "is_media"),
    [
        (b"\0\0\0\x18ftypmp42", True),
        (b"\0\0\0\x18ftypavif", True),
        (b"RIFF\0\0\0\0WAVE", True),
        (b"ID3\3", True),
        (b"BM is a text without a file name", False),
        (b"%PDF-1.7", False),
    ],
)
def test_finds_media_of_other_kinds_by_their_first_bytes(
    start: bytes, is_media: bool
) -> None:
    """Video and audio without a type are charged, and documents are not."""
    form = b"multipart/form-data; boundary=xyz"
    head = UNTYPED.partition(b"; filename")[0] if start[:2] == b"BM" else UNTYPED
    assert (priced(form_of(start, head), form) > 0) is is_media
    if start[:2] != b"BM":
        assert (priced(start, b"application/octet-stream") > 0) is is_media


def test_assumes_what_a_compressed_body_contains() -> None:
    """A server that unpacks it may find anything."""
    body, headers = zlib.compress(b"x" * 10_000), [(b"content-encoding", b"gzip")]
    assert priced(body) == 0
    assert priced(body, headers=headers) == 3 * PLAIN.assumed_pixels
    assert priced(body, headers=[(b"content-encoding", b"identity")]) == 0


@pytest.mark.parametrize(
    ("values", "encoded"),
    [
        ([b"identity", b"gzip"], True),
        ([b"", b"deflate, identity"], True),
        ([b"identity, gzip"], True),
        ([b"identity", b"Identity, identity"], False),
    ],
)
def test_reads_the_list_of_all_content_encodings(
    values: list[bytes], encoded: bool
) -> None:
    """Several headers of one name are one list, of which any entry may be a code."""
    headers = [(b"content-encoding", value) for value in values]
    expected = 3 * PLAIN.assumed_pixels if encoded else 0
    assert priced(b"x" * 100, headers=headers) == expected


@pytest.mark.parametrize("body", [b"", b"no json", b"[" * 100_000, b'{"a": 1}', b"3"])
def test_prices_text_and_nonsense_at_nothing(body: bytes) -> None:
    """What the server will refuse itself is not refused here."""
    assert not priced(body or b" ")


def test_prices_what_is_nested_too_deeply_as_an_image() -> None:
    """A request that cannot be searched may hide one."""
    deep = chat("x")
    for _ in range(40):
        deep = {"messages": [deep]}
    assert priced(json.dumps(deep).encode()) == 300_000


def test_counts_frames_as_the_server_does() -> None:
    """A server that decodes the first frame is not charged for the others."""
    frames = [Image.new("RGB", (10, 10), (shade, 0, 0)) for shade in (0, 90, 180)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    request = chat(data_url(out.getvalue(), "gif"))
    assert estimate(request, PLAIN).tensors == 600
    first = MediaProfile(tensor_bytes_per_pixel=2, all_frames=False)
    assert estimate(request, first).tensors == 200


def test_caps_tensors_of_models_that_scale_down() -> None:
    """The work is for all pixels, the tensors for those that are left."""
    scaled = MediaProfile(
        work_bytes_per_pixel=1, tensor_bytes_per_pixel=2, tensor_pixels=5000
    )
    found = estimate(chat(data_url(FILE)), scaled)
    assert found.tensors == 10_000
    assert found.work >= 20_000


def test_assumes_sizes_without_pillow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without Pillow images are guessed, and the log names the extra, once."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"anyio-lifecycle\[media\]"):
        estimate(BODIES["chat"])
    body = json.dumps(chat(data_url(FILE), data_url(FILE))).encode()
    assert priced(body) == 600_000
    assert len(caplog.records) == 1


def test_chooses_the_profile_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that is imported says which server it is."""
    for name in ("vllm", "sglang", "lmdeploy", "litellm.proxy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert media_profile("auto") is media_profile("default")
    monkeypatch.setitem(sys.modules, "litellm.proxy", sys)
    assert media_profile("auto") is media_profile("proxy")
    monkeypatch.setitem(sys.modules, "sglang", sys)
    assert media_profile("auto") is media_profile("sglang")
    assert media_profile("vllm") is not media_profile("default")
    assert media_profile(PLAIN) is PLAIN
    with pytest.raises(ValueError, match="profile must be one of"):
        media_profile("tgi")


def test_charges_a_proxy_only_the_body() -> None:
    """A proxy decodes nothing, whatever the request contains."""
    video = {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}
    request = {"messages": [{"role": "user", "content": [video]}]}
    url = data_url(FILE)
    assert estimate(chat(url), media_profile("proxy")).total == len(url)
    assert estimate(request, media_profile("proxy")).total < 100


class Clients:
    """Requests at an application, and how many of them it works on at a time.

    Args:
        handing_off: Called with the scope of each request that it works on.
    """

    def __init__(self, handing_off: Callable[[Any], None] = lambda scope: None) -> None:
        self.handing_off = handing_off
        self.inside = self.peak = 0
        self.may_end = anyio.Event()
        self.statuses: list[int | None] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Work on a request until it may end."""
        await receive()
        self.handing_off(scope)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        await self.may_end.wait()
        self.inside -= 1
        await send(OK)
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(self, admission: Admission, body: dict[str, Any]) -> None:
        """Send one request."""
        data = json.dumps(body).encode()
        headers = [(b"content-length", str(len(data)).encode())]
        server = ScriptedServer(data)
        scope = http_scope(CHAT, headers=headers)
        with anyio.fail_after(120):
            await admission(scope, server.receive, server.send)
        self.statuses.append(server.status)


def admission_of(clients: Clients, **options: Any) -> Admission:
    """Admission with easy prices, and the default budget of a large machine."""
    options = {"profile": PLAIN, "bytes": 4 * 2**30, **options}
    return Admission(clients.app, environment={}, **options)


async def test_admits_no_more_pictures_than_fit() -> None:
    """Of many small bodies with large pictures two are worked on at a time."""
    clients = Clients()
    # 12 of 16 MiB are for these; each picture needs 5.4 MB.
    admission = admission_of(clients, bytes=16 * 2**20, profile="default")
    body = chat(data_url(picture(375, 300)))
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(clients.ask, admission, body)
        await anyio.wait_all_tasks_blocked()
        assert clients.inside == 2
        assert admission.statistics()["requests"].waiting == 6
        clients.may_end.set()
    assert clients.statuses == [200] * 8
    assert clients.peak == 2
    assert all(not lane.bytes_in_use for lane in admission.statistics().values())


async def test_keeps_bodies_counted_while_they_wait() -> None:
    """A request gives up the lease of its body when it has the next one, not before."""
    clients = Clients()
    admission = admission_of(clients, bytes=16 * 2**20)
    body = chat(data_url(picture(999, 999)))
    waiting = chat(data_url(picture(999, 999))) | {"user": "x" * 100_000}
    async with anyio.create_task_group() as tasks:
        for each in (body, body, body, body, waiting):
            tasks.start_soon(clients.ask, admission, each)
        await anyio.wait_all_tasks_blocked()
        lanes = admission.statistics()
        assert lanes["requests"].waiting == 1
        assert lanes["bodies"].bytes_in_use >= 300_000
        assert lanes["bodies"].slots_in_use == 1
        clients.may_end.set()
    assert clients.statuses == [200] * 5


async def test_never_waits_in_a_circle() -> None:
    """Requests that fill each lane to the brim all end, whatever their order."""
    clients = Clients()
    clients.may_end.set()
    admission = admission_of(clients, bytes=16 * 2**20)
    bodies = [chat(data_url(picture(900, 900))) | {"user": "x" * 300_000}] * 20
    bodies += [chat(data_url(picture(20, 20))), chat()] * 10
    async with anyio.create_task_group() as tasks:
        for body in bodies:
            tasks.start_soon(clients.ask, admission, body)
    assert clients.statuses == [200] * 40
    assert all(not lane.bytes_in_use for lane in admission.statistics().values())


async def test_refuses_pictures_that_never_fit() -> None:
    """413 for what is known to be too large; a guess is served alone instead."""
    clients = Clients()
    clients.may_end.set()
    admission = admission_of(clients, bytes=2**20)
    image = data_url(picture(999, 999))
    await clients.ask(admission, chat(image, image))
    await clients.ask(admission, chat(image))
    await clients.ask(admission, chat(*["https://example.org/a.png"] * 9))
    assert clients.statuses == [413, 200, 200]


@pytest.mark.parametrize("profile", ["vllm", "sglang", "lmdeploy", "default"])
async def test_serves_many_photos_alone(profile: str) -> None:
    """A dozen photos of twelve megapixels, with the default budget of 4 GiB.

    All that they could need is more; what they certainly need is not. A second such
    request waits for the first, and a text waits for neither.
    """
    clients, photo = Clients(), data_url(picture(4032, 3024, "JPEG"))
    admission = admission_of(clients, profile=profile)
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(clients.ask, admission, chat(*[photo] * 12))
        tasks.start_soon(clients.ask, admission, chat())
        with anyio.fail_after(60):
            while not (
                admission.statistics()["requests"].waiting and clients.inside == 2
            ):
                await anyio.sleep(0.001)
        clients.may_end.set()
    assert clients.statuses == [200] * 3


async def test_refuses_bombs_that_no_budget_decodes() -> None:
    """Two images of Pillow's limit are a few KiB, and 4 GB once they are decoded."""
    clients = Clients()
    clients.may_end.set()
    head = struct.pack(">IIBBBBB", 13_300, 13_300, 8, 2, 0, 0, 0)
    crc = zlib.crc32(b"IHDR" + head)
    png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + head + struct.pack(">I", crc)
    png += b"\x00\x00\x00\x00IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    admission = admission_of(clients, profile="vllm")
    for count in (1, 2):
        await clients.ask(admission, chat(*[data_url(png)] * count))
    assert clients.statuses == [200, 413]


@pytest.mark.parametrize(("share", "inside"), [(0.1, 4), (1.0, 2), (3.0, 1), (9.0, 1)])
async def test_learns_from_what_was_used(share: float, inside: int) -> None:
    """Smaller tensors let more requests in, larger ones fewer, within bounds."""
    body = chat(data_url(picture(500, 500)))
    estimated = estimate(body, PLAIN)

    def hand_off(scope: Any) -> None:
        handed_off(scope, tensor_bytes=int(estimated.tensors * share))

    clients = Clients(hand_off)
    clients.may_end.set()
    admission = admission_of(clients, bytes=16 * 131_072)
    for _ in range(200):
        await clients.ask(admission, body)
    clients.handing_off = lambda scope: None
    clients.peak, clients.may_end = 0, anyio.Event()
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(clients.ask, admission, body)
        await anyio.wait_all_tasks_blocked()
        peak, _ = clients.peak, clients.may_end.set()
    assert peak == inside
    assert set(clients.statuses) == {200}


class Decoder:
    """A FastAPI application such as vLLM's: it decodes the pictures of its requests.

    Attributes:
        bytes_held: Bytes of decoded pictures and tensors at a time.
        peak: Most of them.
    """

    def __init__(self) -> None:
        self.bytes_held = self.peak = self.entered = 0
        self.may_end = asyncio.Event()
        self.app = FastAPI()
        self.app.add_api_route(CHAT, self.complete, methods=["POST"])

    async def complete(self, request: Request) -> dict[str, str]:
        """Answer one request."""
        self.entered += 1
        asked = await request.json()
        url = asked["messages"][0]["content"][1]["image_url"]["url"]
        tensors = await asyncio.to_thread(self.prepare, url)
        await self.may_end.wait()
        self.bytes_held -= len(tensors)
        return {"object": "chat.completion"}

    def prepare(self, url: str) -> bytes:
        """Decode a picture, and make tensors of it."""
        file = base64.b64decode(url.partition(",")[2])
        pixels = Image.open(io.BytesIO(file)).convert("RGB").tobytes()
        tensors = pixels * (1 + 4 + 8)  # the pixels, float32, and its patches
        self.bytes_held += len(tensors)
        self.peak = max(self.peak, self.bytes_held)
        return tensors


@pytest.mark.asyncio
@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("guarded", [True, False])
async def test_bounds_what_a_real_server_decodes(guarded: bool, http: str) -> None:
    """64 clients with pictures stay within 1.15 times the bytes, and exceed them without."""
    budget = 32 * 2**20
    decoder = Decoder()
    admission = Admission(decoder.app, environment={}, bytes=budget)
    app = admission if guarded else decoder.app
    body = chat(data_url(picture(300, 200)))
    async with serving(app, http=http) as port:
        url = f"http://127.0.0.1:{port}{CHAT}"
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            posts = [
                asyncio.create_task(client.post(url, json=body)) for _ in range(64)
            ]
            waiting = 0
            with anyio.fail_after(120):
                while decoder.entered + waiting < 64:
                    await asyncio.sleep(0.001)
                    waiting = admission.statistics()["requests"].waiting
            decoder.may_end.set()
            answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {200}
    if guarded:
        assert 0.2 * budget < decoder.peak <= 1.15 * budget
    else:
        assert decoder.peak > 1.15 * budget


def test_takes_no_byte_of_a_form_for_two_parts() -> None:
    """Boundary marks in front of one head do not copy the body for each of them."""
    content = b"\r\nContent-Type: video/mp4\r\n\r\n" + bytes(2**18)
    body = b"--x" * 1024 + content + b"\r\n--x--\r\n"
    tracemalloc.start()
    try:
        priced(body, b"multipart/form-data; boundary=x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * len(body)


def test_reads_json_with_a_boundary_as_json() -> None:
    """A parameter of the content type hides no image."""
    body = json.dumps(BODIES["chat"]).encode()
    assert priced(body, b"application/json; boundary=x") == priced(body)


def test_prices_images_beyond_a_thousand_by_assumption() -> None:
    """To open each of them would block the event loop."""
    urls = [data_url(picture(1, 1))] * 1025
    assert priced(json.dumps(chat(*urls)).encode(), b"application/json") > 300_000


def test_counts_each_image_beyond_a_thousand() -> None:
    """What is not opened is assumed as often as it is there."""
    url = data_url(picture(1, 1))
    prices = [
        priced(json.dumps(chat(*[url] * count)).encode(), b"application/json")
        for count in (1025, 1034)
    ]
    assert 9 * 300_000 <= prices[1] - prices[0] < 10 * 300_000


def test_parses_no_text_that_can_have_no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most requests, and a crowd of numbers: the application alone parses them."""
    monkeypatch.delattr(json, "loads")
    assert priced(b'{"prompt": "Why?"}') == 0
    assert priced(b' \n[{"prompt":[' + b"1," * 2**19 + b"1]}]") == 0


@pytest.mark.parametrize("file", [b"x", picture(200, 100, "JPEG"), b'"image"', b" "])
def test_parses_no_file_as_json(file: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload of 200 MiB would be decoded, too, only to be no JSON."""
    monkeypatch.delattr(json, "loads")
    assert (priced(file, b"application/octet-stream") > 0) == file.startswith(b"\xff")


def test_copies_no_upload_to_price_it() -> None:
    """A recording in a form, or alone, is counted where it is."""
    size = 8 * 2**20
    head = b'--b\r\ncontent-disposition: form-data; name="f"; filename="a.mp3"\r\n\r\n'
    form = head + b"ID3" + bytes(size) + b"\r\n--b--\r\n"
    file = b"ID3" + bytes(size)
    kinds = (form, b"multipart/form-data; boundary=b"), (file, b"audio/mpeg")
    for body, kind in kinds:
        tracemalloc.start()
        try:
            assert priced(body, kind) > 0
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < size / 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_finds_media_in_every_encoding_of_json(encoding: str) -> None:
    """With a byte order mark, and without."""
    body = json.dumps(chat("https://example.org/x"))
    for text in (body, " \n" + body):
        assert priced(text.encode(encoding)) >= PLAIN.assumed_pixels


@pytest.mark.parametrize(
    "part",
    [
        *({"type": name, "data": "x"} for name in KIND_BY_TYPE),
        *({name: "https://example.org/x"} for name in KIND_BY_FIELD),
    ],
    ids=str,
)
def test_finds_media_by_every_name_there_is(part: dict[str, str]) -> None:
    """As a type or as a field, also escaped, or in another encoding of JSON."""
    request = {"messages": [{"content": [part]}]}
    assert find_media(request)
    text = json.dumps(request)
    escaped = re.sub('(?<=")[a-z]', lambda letter: f"\\u{ord(letter[0]):04x}", text)
    assert json.loads(escaped) == request
    for body in (text.encode(), escaped.encode(), text.encode("utf-16-le")):
        assert priced(body) >= PLAIN.assumed_pixels


def test_parses_no_json_of_very_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop would wait for the parser: seconds for 50 MB of numbers."""
    parsed: list[int] = []
    loads = json.loads

    def loads_noted(text: Any, **options: Any) -> Any:
        parsed.append(len(text))
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", loads_noted)
    text = b'{"note":"image","prompt":[' + b"1," * 2**17 + b"1]}"
    many = b'{"note":"image","prompt":[' + b"1," * (2**18 + 1) + b"1]}"
    assert priced(text) == 0
    assert max(parsed) == len(text)
    parsed.clear()
    assert priced(many) == 300_000
    assert parsed == []
