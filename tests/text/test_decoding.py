"""Images decoded in processes: equal to the same process, and none of its failures reaches the server."""

from __future__ import annotations

import signal
from io import BytesIO

import pytest

from headrace.text import bounded
from headrace.text.bounded import Limits
from headrace.text.decoding import DecodeProcesses
from headrace.text.images import BadPicture, PictureLimits, decode_picture
from tests.text.test_images import LIMITS, bomb, encoded, gradient

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def processes():
    made = DecodeProcesses()
    yield made
    made.close()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("low", [False, True])
def test_pixels_and_digest_are_those_of_the_same_process(processes, form, low):
    data = encoded(gradient(70, 30), form)
    found, expected = processes.decode(data, LIMITS, low), decode_picture(data, LIMITS, low)
    assert bytes(found.pixels) == expected.pixels
    assert found._replace(pixels=b"") == expected._replace(pixels=b"")


@pytest.mark.parametrize("data", [b"", b"hello", bomb(60_000, 60_000), encoded(gradient(), "PNG")[:50]])
def test_errors_are_those_of_the_same_process(processes, data):
    with pytest.raises(BadPicture) as expected:
        decode_picture(data, LIMITS)
    with pytest.raises(BadPicture) as found:
        processes.decode(data, LIMITS)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(0.001, 60.0), "more than 0.001 s of CPU time"),
        (Limits(60.0, 0.001), "more than 0.001 s"),
        (Limits(60.0, 60.0, 1 << 20), "more than 1048576 bytes of memory|cannot be decoded"),
    ],
)
def test_a_decoder_that_reaches_a_limit_is_ended(processes, monkeypatch, limits, why):
    data = encoded(Image.new("RGB", (3000, 3000)), "PNG", compress_level=1)
    large = PictureLimits(1 << 20, 9_000_000)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.text.decoding.decoder_limits", lambda within: limits)
        with pytest.raises(BadPicture, match=why):
            processes.decode(data, large)
    assert processes.decode(data, large)[:2] == (3000, 3000)


def test_a_decoder_that_is_killed_is_replaced(processes, monkeypatch):
    data, exchange = encoded(gradient(), "PNG"), bounded._exchange

    def killed(process, line, payload):
        process.send_signal(signal.SIGSEGV)
        return exchange(process, line, payload)

    with monkeypatch.context() as patch:
        patch.setattr(bounded, "_exchange", killed)
        with pytest.raises(BadPicture, match="its decoder was stopped: its process ended"):
            processes.decode(data, LIMITS)
    assert processes.decode(data, LIMITS)[:2] == (16, 8)


def test_a_process_stays_for_the_next_image(processes):
    file = BytesIO()
    Image.new("RGBA", (2000, 2000), (1, 2, 3, 4)).save(file, "PNG", compress_level=1)
    first = processes.decode(file.getvalue(), PictureLimits(1 << 20, 4_000_000))
    idle = [process.pid for process in processes._processes._idle]
    assert processes.decode(file.getvalue(), PictureLimits(1 << 20, 4_000_000)).digest == first.digest
    assert [process.pid for process in processes._processes._idle] == idle
