"""Images of an engine behind a socket: its encoder counts, and its host runs on a thread of the test."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from headrace.compute.images.cache import ImageCache
from headrace.compute.images.families import UnusableImage
from headrace.compute.images.rows_bytes import SharedRows, from_bytes, to_bytes
from headrace.core.images import ImageSpan
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.service.engine_host import EngineHost
from headrace.service.engine_process import EngineProcess, FromEngine
from headrace.service.images import ImagesLost
from headrace.service.packing import frame, packed, unpacked
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.text.images import BadPicture, Picture
from headrace.wiring.image_encoding import LocalEncoding
from headrace.wiring.images import ModelImages
from headrace.wiring.remote_images import IMAGE_QUESTIONS, PIXELS, ImageQuestions, RemoteEncoding, with_rows
from tests.api.image_text import Given
from tests.compute.images.test_cache import image
from tests.service.test_engine_process import SOON, Child
from tests.wiring.test_images import MARK, CountingEncoder, Slices, pictures

pytestmark = pytest.mark.anyio

CPU = torch.device("cpu")


class Processes:
    """Engine processes as threads, one after the other: each dies when it is asked to encode an image of ``deadly``."""

    lasting = frozenset[str]()

    def __init__(self, deadly: bytes, slices: list[Slices]) -> None:
        self.deadly, self.slices = deadly, slices
        self.encoders, self.questions = list[CountingEncoder](), list[ImageQuestions]()
        self.backgrounds = list[list[int]]()
        self.threads = list[threading.Thread]()

    def start(self):
        ours, theirs = socket.socketpair()
        encoder, background = CountingEncoder(), list[int]()
        slices = self.slices[min(len(self.encoders), len(self.slices) - 1)]
        questions = ImageQuestions(LocalEncoding(encoder, slices, background.append))
        plain, refuse = encoder.encoded, CountingEncoder.inputs

        def encoded(inputs: bytes):
            if inputs == self.deadly:
                theirs.shutdown(socket.SHUT_RDWR)
            return plain(inputs)

        def inputs(width: int, height: int, pixels: bytes, several: bool) -> bytes:
            if bytes(pixels) == b"bad":
                raise UnusableImage("the model's processor refuses it")
            return bytes(refuse(encoder, width, height, pixels, several))

        encoder.encoded, encoder.inputs = encoded, inputs
        self.encoders.append(encoder)
        self.questions.append(questions)
        self.backgrounds.append(background)
        self.threads.append(threading.Thread(target=self.run, args=(theirs, questions), daemon=True))
        self.threads[-1].start()
        return ours, Child(-9)

    def run(self, connection: socket.socket, questions: ImageQuestions) -> None:
        connection.sendall(frame((FromEngine.DESCRIBED, 0)))
        engine = hashing_engine()[0]
        answer = lambda name, given: questions.answer(name, *given)  # noqa: E731
        EngineHost(connection, engine, answer, lambda: 0, beside=IMAGE_QUESTIONS).run()
        questions.close()
        connection.close()

    def accept(self, description):
        return description


@asynccontextmanager
async def placing(*slices: Slices, deadly: bytes = b"", again: bool = True):
    """Images of an engine process, and the processes."""
    processes = Processes(deadly, list(slices) or [Slices()])
    connection, child = processes.start()
    while not connection.recv(1 << 16):
        pass
    process = EngineProcess(connection, child)
    process.successors = processes if again else None
    service = Service(process, Limits(64, 1 << 20))
    service.start()
    images = ModelImages(RemoteEncoding(process, CountingEncoder.keys), ImageCache(1 << 20))
    try:
        async with asyncio.timeout(SOON):
            yield images, processes
    finally:
        process.end()
        for each in processes.threads:
            await asyncio.to_thread(each.join, SOON)
            assert not each.is_alive()


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_rows_are_the_same_as_bytes() -> None:
    plain = image(5).features
    deep = torch.arange(2 * 5 * 6, dtype=torch.bfloat16).reshape(2, 5, 6)
    rows = torch.randn(5, 6).to(torch.bfloat16)
    for given in (
        plain,
        replace(plain, rows=rows, deep=deep, grid=(2, 3)),
        replace(plain, rows=rows.T[:, :3]),
    ):
        found = from_bytes(to_bytes(given), CPU)
        assert torch.equal(found.rows, given.rows)
        assert found.rows.dtype == given.rows.dtype
        assert found.offsets.tolist() == given.offsets.tolist()
        assert found.grid == given.grid
        assert found.deep is None if given.deep is None else torch.equal(found.deep, given.deep)


def test_requests_with_equal_images_share_their_rows_as_long_as_there_is_one() -> None:
    rows, data = SharedRows(CPU), to_bytes(image(5).features)

    def received(name: str, digest: bytes) -> Request:
        sent = Request(name, (9,) * 5, SamplingParams(), images=(ImageSpan(0, 5, digest, data),))
        message = packed(Request, sent)
        return with_rows(rows, unpacked(Request, message))

    first, second, other = received("a", b"x" * 32), received("b", b"x" * 32), received("c", b"y" * 32)
    assert torch.equal(first.images[0].features.rows, image(5).features.rows)
    assert first.images[0].features is second.images[0].features is not other.images[0].features
    assert len(rows) == 2
    del first, other
    gc.collect()
    assert len(rows) == 1
    assert with_rows(rows, replace(second, images=())).images == ()


async def test_images_are_encoded_once_by_the_process_and_cached_here() -> None:
    async with placing() as (images, processes):
        sent = pictures(3)
        placed = await asyncio.gather(
            *(images.place([1, MARK, MARK], [sent[at], sent[2]], "") for at in (0, 1))
        )
        expected = image(5)
        for each in placed:
            assert each.tokens == (1, *expected.tokens, *expected.tokens)
            assert torch.equal(from_bytes(each.images[0].features, CPU).rows, expected.features.rows)
        assert placed[0].images[1].digest == placed[1].images[1].digest != placed[0].images[0].digest
        (encoder,), (questions,) = processes.encoders, processes.questions
        assert sorted(encoder.ended) == [bytes([each] * 3) for each in range(3)]
        counts = images.counts()
        assert counts.seconds > 0
        assert counts.nbytes == 3 * (len(placed[0].images[0].features) + 8 * 5)
        await images.place([MARK], [sent[0]], "")
        assert encoder.count == 3
        await until(lambda: not questions.open)
        await until(lambda: sum(processes.backgrounds[0]) == 0)
        assert 1 in processes.backgrounds[0]


async def test_the_next_image_is_prepared_while_one_is_encoded() -> None:
    slices = Slices()
    async with placing(slices) as (images, processes):
        slices.open.clear()
        tasks = [asyncio.create_task(images.place([MARK], [each], "")) for each in pictures(3)]
        await until(lambda: 1 in processes.questions[0]._prepared)  # the third waits
        assert processes.questions[0].open == 2
        processes.questions[0]._loop.call_soon_threadsafe(slices.open.set)
        await asyncio.gather(*tasks)
        assert processes.encoders[0].ended == [bytes([each] * 3) for each in range(3)]


@pytest.mark.parametrize("begun", [False, True])
async def test_an_image_whose_request_is_cancelled_is_given_up_by_the_process(begun: bool) -> None:
    slices = Slices()
    async with placing(slices) as (images, processes):
        first, second = pictures(2)
        (questions,), (encoder,) = processes.questions, processes.encoders
        if not begun:
            slices.open.clear()
        cancelled = asyncio.create_task(images.place([MARK], [first], ""))
        await until(lambda: slices.count >= 3 if begun else questions._working)
        slices.open.clear()
        waiting = asyncio.create_task(images.place([MARK], [second], ""))
        await until(lambda: 1 in questions._prepared)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        questions._loop.call_soon_threadsafe(slices.open.set)
        assert (await waiting).tokens == image(5).tokens
        assert encoder.ended == [bytes([1] * 3)]
        await until(lambda: not questions.open)


async def test_an_image_that_is_prepared_for_nothing_is_dropped() -> None:
    slices = Slices()
    async with placing(slices) as (images, processes):
        slices.open.clear()
        questions = processes.questions[0]
        tasks = [asyncio.create_task(images.place([MARK], [each], "")) for each in pictures(2)]
        await until(lambda: 1 in questions._prepared)
        tasks[1].cancel()
        await until(lambda: not questions._prepared)
        questions._loop.call_soon_threadsafe(slices.open.set)
        await tasks[0]


async def test_an_image_that_is_refused_has_its_number() -> None:
    async with placing() as (images, processes):
        bad = Given(Picture.of(1, 1, b"bad"), b"file")
        with pytest.raises(BadPicture, match="the model's processor refuses it") as refused:
            await images.place([MARK, MARK], [pictures(1)[0], bad], "")
        assert refused.value.index == 1
        await until(lambda: not processes.questions[0].open)


async def test_another_process_encodes_what_the_lost_one_had_not() -> None:
    slow = Slices()
    async with placing(slow, Slices()) as (images, processes):
        slow.open.clear()
        tasks = [asyncio.create_task(images.place([MARK], [each], "")) for each in pictures(3)]
        await until(lambda: 1 in processes.questions[0]._prepared)
        images._encoding.background(1)
        images._encoding._process._connection.shutdown(socket.SHUT_RDWR)
        assert [each.tokens for each in await asyncio.gather(*tasks)] == [image(5).tokens] * 3
        assert processes.encoders[1].ended == [bytes([each] * 3) for each in range(3)]
        await until(lambda: sum(processes.backgrounds[1]) == 1)  # it knows what is decoded


async def test_pixels_that_two_processes_have_in_part_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wiring.remote_images.PIECE", 5)
    large = Picture.of(5, 3, bytes(range(45)))
    async with placing() as (images, processes):
        process, sent = images._encoding._process, list[bytes]()
        post = process.post

        def noted(name: str, *given):
            if name == PIXELS:
                sent.append(bytes(given[1]))
                if len(sent) == 4:
                    process._connection.shutdown(socket.SHUT_RDWR)
            return post(name, *given)

        monkeypatch.setattr(process, "post", noted)
        await images.place([MARK], [Given(large)], "")
        assert [bytes(each) for encoder in processes.encoders for each in encoder.ended] == [large.pixels]
        assert len(processes.encoders) == 2
        assert len(sent) > len(large.pixels) / 5


async def test_an_image_that_ends_every_process_fails_before_there_is_none() -> None:
    async with placing(deadly=bytes(3)) as (images, processes):
        with pytest.raises(ImagesLost, match="a part of the model was lost: its process ended by SIGKILL"):
            await images.place([MARK], [pictures(1)[0]], "")
        assert len(processes.encoders) == 4
        assert (await images.place([MARK], [pictures(2)[1]], "")).tokens == image(5).tokens


async def test_without_another_process_images_fail() -> None:
    async with placing(deadly=bytes(3), again=False) as (images, _):
        for number in range(2):  # while it is lost, and later
            with pytest.raises(ImagesLost, match=r"^the engine failed$"):
                await images.place([MARK], [pictures(2)[number]], "")
