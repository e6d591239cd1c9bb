"""Images of an engine behind a socket: its encoder counts, and its host runs on a thread of the test."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.compute.images.cache import EncodedImage, ImageCache
from headrace.compute.images.families import UnusableImage
from headrace.compute.images.rows_file import RowsFile, SharedRows, read_rows, stored_bytes, write_rows
from headrace.compute.images.slots import ImageRows
from headrace.core.images import ImageSpan
from headrace.core.request import FinishReason, Request, SamplingParams
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
from headrace.wiring.remote_images import (
    IMAGE_QUESTIONS,
    PIXELS,
    ImageQuestions,
    RemoteEncoding,
    with_places,
    with_rows,
)
from tests.api.image_text import Given
from tests.compute.images.test_cache import image
from tests.compute.images.test_rows_file import PAGE, memory_of
from tests.doubles.engine_processes import Child, read
from tests.doubles.services import SOON, Leash
from tests.wiring.test_images import MARK, CountingEncoder, Slices, pictures

pytestmark = pytest.mark.anyio

CPU = torch.device("cpu")


class Processes:
    """Engine processes as threads, one after the other: each dies when it is asked to encode an image of ``deadly``."""

    lasting = frozenset[str]()

    def __init__(self, deadly: bytes, slices: list[Slices], encoded: EncodedImage, held: bool) -> None:
        self.deadly, self.slices, self.encoded, self.held = deadly, slices, encoded, held
        self.file = RowsFile()
        self.received = list[Request]()
        self.encoders, self.questions = list[CountingEncoder](), list[ImageQuestions]()
        self.backgrounds = list[list[int]]()
        self.threads = list[threading.Thread]()
        self.leashes = list[Leash]()

    def start(self):
        ours, theirs = socket.socketpair()
        encoder, background = CountingEncoder(), list[int]()
        slices = self.slices[min(len(self.encoders), len(self.slices) - 1)]
        questions = ImageQuestions(LocalEncoding(encoder, slices, background.append), self.file.fd)
        plain, refuse = encoder.encoded, CountingEncoder.inputs

        def encoded(inputs: bytes):
            if inputs == self.deadly:
                theirs.shutdown(socket.SHUT_RDWR)
            plain(inputs)
            return self.encoded

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
        engine, runner = hashing_engine()
        if self.held:
            self.leashes.append(Leash(runner, 3))
        rows = SharedRows(self.file.fd, CPU)

        def received(request: Request) -> Request:
            self.received.append(with_rows(rows, request))
            images = [each._replace(features=1) for each in request.images]
            return replace(request, images=tuple(images))

        answer = lambda name, given: questions.answer(name, *given)  # noqa: E731
        EngineHost(connection, engine, answer, lambda: 0, beside=IMAGE_QUESTIONS, received=received).run()
        questions.close()
        connection.close()

    def accept(self, description):
        return description


@asynccontextmanager
async def placing(
    *slices: Slices,
    deadly: bytes = b"",
    again: bool = True,
    encoded: EncodedImage | None = None,
    held: bool = False,
):
    """Images of an engine process, and the processes. Each image is ``encoded`` to the same.

    ``held``: each process launches three steps, and more when the test frees its leash.
    """
    processes = Processes(deadly, list(slices) or [Slices()], encoded or image(5), held)
    connection, child = processes.start()
    while not connection.recv(1 << 16):
        pass
    process = EngineProcess(connection, child, sent=with_places)
    process.successors = processes if again else None
    service = Service(process, Limits(64, 1 << 20))
    service.start()
    processes.service = service
    encoding = RemoteEncoding(process, CountingEncoder.keys, processes.file)
    images = ModelImages(encoding, ImageCache(1 << 20))
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


def test_requests_with_equal_images_share_their_rows_as_long_as_there_is_one() -> None:
    file, expected = RowsFile(), image(5).features
    rows, placed = SharedRows(file.fd, CPU), file.place(stored_bytes(expected))
    write_rows(file.fd, placed.at, expected)

    def received(name: str, digest: bytes) -> Request:
        made = Request(name, (9,) * 5, SamplingParams(), images=(ImageSpan(0, 5, digest, placed),))
        message = packed(Request, with_places(made))
        return with_rows(rows, unpacked(Request, message))

    first, second, other = received("a", b"x" * 32), received("b", b"x" * 32), received("c", b"y" * 32)
    assert torch.equal(first.images[0].features.rows, expected.rows)
    assert first.images[0].features is second.images[0].features is not other.images[0].features
    assert len(rows) == 2
    del first, other
    gc.collect()
    assert len(rows) == 1
    text = replace(second, images=())
    assert with_rows(rows, with_places(text)) is text


async def test_images_are_encoded_once_by_the_process_and_cached_here() -> None:
    async with placing() as (images, processes):
        sent = pictures(3)
        placed = await asyncio.gather(
            *(images.place([1, MARK, MARK], [sent[at], sent[2]], "") for at in (0, 1))
        )
        expected = image(5)
        for each in placed:
            assert each.tokens == (1, *expected.tokens, *expected.tokens)
            rows = each.images[0].features
            found = read_rows(processes.file.fd, rows.at, rows.nbytes, CPU)
            assert torch.equal(found.rows, expected.features.rows)
        assert placed[0].images[1].digest == placed[1].images[1].digest != placed[0].images[0].digest
        (encoder,), (questions,) = processes.encoders, processes.questions
        assert sorted(encoder.ended) == [bytes([each] * 3) for each in range(3)]
        counts = images.counts()
        assert counts.seconds > 0
        assert counts.nbytes == 3 * (placed[0].images[0].features.nbytes + 8 * 5)
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


async def test_no_message_has_the_rows_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def noted(message):
        made = frame(message)
        sizes.append(len(made))
        return made

    for module in ("engine_process", "engine_host"):
        monkeypatch.setattr(f"headrace.service.{module}.frame", noted)
    large = EncodedImage((9,) * 5, ImageRows(torch.randn(5, 1 << 20), np.arange(5)))
    async with placing(encoded=large) as (images, processes):
        placed = await images.place([MARK], pictures(1), "")
        request = Request("a", placed.tokens, SamplingParams(max_tokens=1), images=placed.images)
        answer = processes.service.open([request])
        await read(answer)
        processes.service.close(answer)
        (received,) = processes.received
        assert torch.equal(received.images[0].features.rows, large.features.rows)
        assert max(sizes) < 1 << 12
        assert memory_of(processes.file, (20 << 20) + PAGE) == (20 << 20) + PAGE
        del placed, request, answer  # it is too large for the cache
        assert await asyncio.to_thread(memory_of, processes.file, 0) == 0


SOME = EncodedImage((9,) * 5, ImageRows(torch.randn(5, 6), np.arange(5)))


class HeldWrite:
    """The first rows that are written: they are in the file, and their process has not reported it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr("headrace.wiring.remote_images.write_rows", self)

    def __call__(self, file: int, at: int, features: ImageRows) -> None:
        write_rows(file, at, features)
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(SOON)


async def test_rows_that_a_client_has_left_keep_their_place_while_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldWrite(monkeypatch)
    async with placing(encoded=SOME) as (images, processes):
        left = asyncio.create_task(images.place([MARK], pictures(1), ""))
        await until(held.reached.is_set)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        waiting = asyncio.create_task(images.place([MARK], pictures(2)[1:], ""))
        await asyncio.sleep(0.02)
        assert memory_of(processes.file, PAGE) == PAGE
        held.go.set()
        rows = (await waiting).images[0].features
        assert await asyncio.to_thread(memory_of, processes.file, PAGE) == PAGE
        found = read_rows(processes.file.fd, rows.at, rows.nbytes, CPU)
        assert torch.equal(found.rows, SOME.features.rows)
        await until(lambda: not processes.questions[0].open)
        await until(lambda: not images._encoding._process._asked)


async def test_rows_that_a_lost_process_has_written_are_computed_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldWrite(monkeypatch)
    async with placing(encoded=SOME) as (images, processes):
        waiting = asyncio.create_task(images.place([MARK], pictures(1), ""))
        await until(held.reached.is_set)
        images._encoding._process._connection.shutdown(socket.SHUT_RDWR)
        rows = (await waiting).images[0].features
        assert [encoder.count for encoder in processes.encoders] == [1, 1]
        assert rows.at > 0
        assert await asyncio.to_thread(memory_of, processes.file, PAGE) == PAGE
        found = read_rows(processes.file.fd, rows.at, rows.nbytes, CPU)
        assert torch.equal(found.rows, SOME.features.rows)
        held.go.set()


async def test_requests_find_their_rows_in_the_next_process() -> None:
    async with placing(encoded=SOME, held=True) as (images, processes):
        placed = await images.place([MARK], pictures(1), "")
        params = SamplingParams(max_tokens=100)
        answer = processes.service.open([Request("a", placed.tokens, params, images=placed.images)])
        await until(lambda: processes.received)
        images._encoding._process._connection.shutdown(socket.SHUT_RDWR)
        await until(lambda: len(processes.leashes) == 2)
        for leash in processes.leashes:
            leash.free.set()
        assert (await read(answer))[-1].reason is FinishReason.LENGTH
        processes.service.close(answer)
        first, second = (each.images[0].features for each in processes.received)
        assert first is not second
        assert torch.equal(first.rows, SOME.features.rows)
        assert torch.equal(second.rows, SOME.features.rows)
        assert [encoder.count for encoder in processes.encoders] == [1, 0]


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
