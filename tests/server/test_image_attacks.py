"""Hostile images against a server process: each is refused with a reason, and other requests do not notice."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.api.image_text import data_url
from tests.api.test_fetching import Host
from tests.llm.test_images import file, made_llava
from tests.server.conftest import Server, serving
from tests.text.test_images import bomb, chunk

pytestmark = pytest.mark.slow

PNG = file(1)[1]
PIXELS = 2_000_000


class Hosting:
    """A `Host` on a loop of its own, which ends with every connection that is still open."""

    def __init__(self) -> None:
        self.host = Host()
        self._port: Future[int] = Future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        self.port = self._port.result()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self.host.answer, "127.0.0.1", 0)
        self._port.set_result(server.sockets[0].getsockname()[1])
        await self._ended.wait()
        server.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()


@pytest.fixture(scope="module")
def host() -> Iterator[Hosting]:
    made = Hosting()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_llava(tmp_path_factory)


@pytest.fixture(scope="module")
def server(folder: Path, host: Hosting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-model-len", "120", "--max-image-pixels", str(PIXELS), "--max-image-bytes", "1000000"]
    flags += ["--allowed-media-domains", f"127.0.0.1:{host.port}", "--allow-private-media-addresses"]
    flags += ["--batch-path", str(tmp_path_factory.mktemp("batches"))]
    with serving(str(folder), *flags) as running:
        yield running


def body(*urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "w1"}, *images]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def frames(form: str, number: int) -> bytes:
    each = [Image.new("P" if form == "GIF" else "RGB", (64, 64), n % 200) for n in range(number)]
    return saved(each[0], form, save_all=True, append_images=each[1:])


def text_bomb() -> bytes:
    """A PNG file whose text is 100 MB when it is decompressed."""
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000)))
    return PNG[:33] + text + PNG[33:]


def promised(width: int, height: int) -> bytes:
    """A GIF file with a large canvas and a tiny frame."""
    small = saved(Image.new("P", (4, 4)), "GIF")
    return small[:6] + width.to_bytes(2, "little") + height.to_bytes(2, "little") + small[10:]


REFUSED = {
    "html after a GIF's signature": (b"GIF89a/*<html><script>alert(1)</script>", "cannot be"),
    "svg": (
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "no image in",
    ),
    "pdf": (b"%PDF-1.7\n1 0 obj", "no image in"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0", "no image in"),
    "bomb": (bomb(60_000, 60_000), "pixels"),
    "a few pixels too many": (saved(Image.new("1", (2001, 1000)), "PNG"), "2001 x 1000 pixels"),
    "text bomb": (text_bomb(), "cannot be"),
    "canvas": (promised(60_000, 60_000), "pixels"),
    "cut off": (PNG[: len(PNG) // 2], "cannot be decoded"),
    "empty": (b"", "no image in"),
}


def refused(server: Server, *urls: str) -> str:
    began = time.monotonic()
    answer = server.post("/v1/chat/completions", body(*urls))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] in ("invalid_image", "too_many_images")
    assert time.monotonic() - began < 30
    assert server.post("/v1/chat/completions", body()).status_code == 200
    return str(error["message"])


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_no_usable_image(server: Server, name: str) -> None:
    data, why = REFUSED[name]
    assert why in refused(server, data_url(data))


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_thousands_of_frames_are_one_image(server: Server, form: str) -> None:
    answer = server.post("/v1/chat/completions", body(data_url(frames(form, 3000), f"image/{form.lower()}")))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("mode", ["CMYK", "I;16", "P", "LA", "1"])
@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (40, 30)])
def test_unusual_sizes_and_modes_end_with_an_answer_or_a_reason(
    server: Server, mode: str, size: tuple[int, int]
) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    if form == "JPEG" and max(size) > 65_000:
        size = (1, 65_000)
    answer = server.post("/v1/chat/completions", body(data_url(saved(Image.new(mode, size), form))))
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "invalid_image"
    assert max(size) > 1000 or answer.status_code == 200


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64," + " \n" * 100_000 + base64.b64encode(PNG).decode(), "not valid base64"),
        ("data:image/png," + "A" * 100, "base64"),
        ("data:;charset=utf-8," + "A" * 100, "base64"),
        ("data:text/html;base64," + base64.b64encode(PNG).decode(), "which is no image"),
        ("data:" + "a" * 100_000, "base64"),
        ("data:image/png;base64", "base64"),
        ("data:image/png;base64," + "A" * 1_400_000, "larger than 1000000 bytes"),
        ("data:image/png;base64,\u00e9\u20ac", "not valid base64"),
    ],
)
def test_odd_data_urls(server: Server, url: str, why: str) -> None:
    message = refused(server, url)
    assert why in message
    assert len(message) < 500


def test_a_type_with_parameters_is_read(server: Server) -> None:
    url = data_url(PNG).replace("image/png;", "IMAGE/PNG;name=x;")
    assert server.post("/v1/chat/completions", body(url)).status_code == 200


def test_a_hundred_images(server: Server) -> None:
    assert "the prompt has 100 images; at most 64" in refused(server, *[data_url(PNG)] * 100)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("to/http://169.254.169.254/latest/meta-data", "not among the hosts"),
        ("to/file:///etc/passwd", "must begin with http"),
        ("to//to//to//to//to//x", "redirect"),
        ("type/text/html", "content type 'text/html'"),
        ("sends/3000000", "larger than 1000000 bytes"),
        ("says/99999999999", "larger than 1000000 bytes"),
        ("drips/", "did not send the image in 5 s"),
        ("silent/", "did not send the image in 5 s"),
        ("status/404", "status 404"),
    ],
)
def test_hostile_hosts(server: Server, host: Hosting, path: str, why: str) -> None:
    assert why in refused(server, f"http://127.0.0.1:{host.port}/{path}")


def test_requests_without_images_do_not_wait_for_slow_hosts(server: Server, host: Hosting) -> None:
    slow = body(f"http://127.0.0.1:{host.port}/silent/")

    async def scene() -> tuple[list[int], list[int], bool]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            attacks = [asyncio.create_task(client.post("/v1/chat/completions", json=slow)) for _ in range(40)]
            quick = [(await client.post("/v1/chat/completions", json=body())).status_code]
            before = not any(attack.done() for attack in attacks)
            quick += [(await client.post("/v1/chat/completions", json=body())).status_code for _ in range(4)]
            return [answer.status_code for answer in await asyncio.gather(*attacks)], quick, before

    statuses, quick, before = asyncio.run(scene())
    assert quick == [200] * 5
    assert before, "they were answered while the slow hosts were waited for"
    assert statuses == [400] * 40


def test_an_image_is_given_up_when_its_client_disconnects(server: Server, host: Hosting) -> None:
    """Its host is silent for longer than the time that a host has, after which a client would get 400."""
    since, asked = len(server.lines), len(host.host.asked)
    slow, headers = body(f"http://127.0.0.1:{host.port}/silent/"), {"X-Request-Id": "left"}

    async def scene() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            call = asyncio.create_task(client.post("/v1/chat/completions", json=slow, headers=headers))
            while len(host.host.asked) == asked:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.wait([call])

    asyncio.run(scene())
    until = time.monotonic() + 60
    while not (found := [line for line in server.lines[since:] if "left" in line]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert " 499 " in found[0]
    assert " error=client_disconnected " in found[0]
    assert not any("ERROR" in line or "Traceback" in line for line in server.lines[since:])


def test_batches_and_logs(server: Server) -> None:
    """A batch with images: the lines with bad ones get 400, and nothing that is logged has an image."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body(url)}
        for number, url in enumerate((data_url(PNG), data_url(b"no image"), data_url(file(2)[1])))
    ]
    sent = "\n".join(map(json.dumps, lines)).encode()
    given = httpx.post(
        f"{server.url}/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", sent)}, timeout=60
    ).json()
    asked = {"input_file_id": given["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = server.post("/v1/batches", asked).json()
    until = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
        batch = server.get(f"/v1/batches/{batch['id']}").json()
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    errors = server.get(f"/v1/files/{batch['error_file_id']}/content").text
    assert "no image in PNG" in errors
    mark = base64.b64encode(PNG).decode()[40:100]
    assert mark not in "\n".join(server.lines)
    assert mark not in errors
