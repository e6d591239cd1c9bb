"""Images that front ends send: placed once, found again by requests, and dropped when nothing refers to them."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from headrace.api.compile.bodies import ImageUrl
from headrace.api.compile.pictures import PictureReader, SentImage
from headrace.api.compile.policies import PromptPolicy, Rules
from headrace.api.errors import ApiError
from headrace.api.exchange import Hooks
from headrace.api.fronts.front import OwnerConnection, read_hello
from headrace.api.fronts.owner import Owner
from headrace.api.fronts.pictures import numbered
from headrace.api.serving import CallNotes
from headrace.core.images import ImageSpan
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.lookup import CacheLookup
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.text.images import BadPicture
from tests.api.fronts.test_pooling import until
from tests.api.image_text import MARK, ColumnImages, data_url, png

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def taking_images(tmp_path):
    """An owner whose model takes images, one connection, and what places images in its front end."""
    lookup, images = CacheLookup(Service(hashing_engine()[0], Limits(100, 1000))), ColumnImages()
    model = SimpleNamespace(
        rules=Rules(),
        max_model_len=128,
        vocab_size=1000,
        prompts=PromptPolicy(),
        cost=None,
        adapters=None,
        images=images,
        no_images="",
        pictures=PictureReader(),
    )
    owner = Owner(lookup, model, CallNotes(), lambda tenant, name: {}, Hooks(), False)
    path = str(tmp_path / "calls")
    await lookup.start()
    server = await asyncio.get_running_loop().create_unix_server(owner.connect, path)
    front = OwnerConnection(path, similar=False)
    text = (await read_hello(path)).text
    assert text.image_part == {"type": "image"}
    remote = front.takes_images(text.image_part)
    await front.connect()
    try:
        async with asyncio.timeout(60):
            await until(lambda: len(owner.connections) == 1)
        (kept,) = [each._images for each in owner.connections]
        yield SimpleNamespace(remote=remote, kept=kept, images=images, front=front)
    finally:
        front.stop()
        server.close()
        await lookup.stop()


async def files(*contents: bytes, detail: str | None = None):
    sent = [
        SentImage(f"messages[0].content[{at}]", "image_url.url", ImageUrl(url=data_url(each), detail=detail))
        for at, each in enumerate(contents)
    ]
    return await PictureReader().read(sent)


async def test_images_are_placed_at_the_owner_and_dropped_with_the_last_reference(tmp_path):
    async with taking_images(tmp_path) as there:
        placed = await there.remote.place([5, MARK, 6, MARK], await files(png(3), png(2)), "ann\0")
        assert placed.tokens == (5, *[MARK] * 3, 6, *[MARK] * 2)
        assert [(each.start, each.length) for each in placed.images] == [(1, 3), (5, 2)]
        assert [each.digest for each in placed.images] == [each.digest for each in there.images.pictures]
        crossing = numbered(placed.images)
        restored = there.kept.restored(crossing)
        assert [each.features for each in restored] == [each.digest[0] for each in placed.images]
        assert [each._replace(features=None) for each in restored] == [
            each._replace(features=None) for each in placed.images
        ]
        one = placed.images[1]
        del placed
        gc.collect()
        await asyncio.sleep(0.05)
        assert there.kept.kept == 1
        assert isinstance(one, ImageSpan)
        del one
        gc.collect()
        await until(lambda: not there.kept.kept)


async def test_low_detail_crosses(tmp_path):
    async with taking_images(tmp_path) as there:
        await there.remote.place([MARK], await files(png(2, 600), detail="low"), "ann\0")
        assert there.images.pictures[0].height < 600


@pytest.mark.parametrize(
    ("tokens", "contents", "kind", "said"),
    [
        ([MARK], [png(40)], BadPicture, "more than 30 columns"),
        ([MARK, MARK], [png(4), b"GIF89a"], ApiError, r"messages\[0\].content\[1\].image_url.url"),
        ([5], [png(4)], BadPicture, "leaves out"),
    ],
)
async def test_what_cannot_be_placed_is_the_error_of_one_process(tmp_path, tokens, contents, kind, said):
    async with taking_images(tmp_path) as there:
        with pytest.raises(kind, match=said) as refused:
            await there.remote.place(tokens, await files(*contents), "ann\0")
        with pytest.raises(kind) as alone:
            await ColumnImages().place(tokens, await files(*contents), "ann\0")
        names = ("status", "param", "code", "type", "index")
        facts = [[getattr(each.value, name, None) for name in names] for each in (refused, alone)]
        assert (facts[0], str(refused.value)) == (facts[1], str(alone.value))
        await until(lambda: not there.kept.kept)


async def test_a_failure_or_the_end_of_either_side_ends_what_waits(tmp_path, monkeypatch, caplog):
    async with taking_images(tmp_path) as there:
        never = asyncio.Event()

        async def waits(tokens, pictures, scope):
            await never.wait()
            raise ZeroDivisionError

        monkeypatch.setattr(there.images, "place", waits)
        left = asyncio.create_task(there.remote.place([MARK], await files(png(2)), ""))
        await until(lambda: there.kept.kept == 1)
        left.cancel()
        await until(lambda: not there.kept.kept)
        failed = asyncio.create_task(there.remote.place([MARK], await files(png(2)), ""))
        await until(lambda: there.kept.kept == 1)
        never.set()
        with pytest.raises(ApiError) as refused:
            await failed
        assert refused.value.status == 500
        assert "cannot be placed" in caplog.text
        never.clear()
        ends = asyncio.create_task(there.remote.place([MARK], await files(png(2)), ""))
        await until(lambda: there.kept.kept == 1)
        there.front.stop()
        with pytest.raises(ApiError) as refused:
            await ends
        assert refused.value.status == 503
        await until(lambda: not there.kept.kept)
