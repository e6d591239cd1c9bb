"""Images of requests are decoded within limits; everything else is refused with its reason."""

from __future__ import annotations

import random
import signal
import struct
import zlib
from io import BytesIO

import pytest

from headrace.text import bounded
from headrace.text.bounded import Limits
from headrace.text.images import (
    LOW_SIDE,
    MOST_SCANS,
    BadPicture,
    DecodeProcesses,
    Picture,
    PictureLimits,
    decode_picture,
)

Image = pytest.importorskip("PIL.Image")

LIMITS = PictureLimits(1 << 20, 10_000)


def encoded(image, form, **options):
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def gradient(width=16, height=8):
    image = Image.new("RGB", (width, height))
    image.putdata([(x * 15, y * 30, 90) for y in range(height) for x in range(width)])
    return image


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width, height):
    """A PNG file of a few bytes that says to have many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(
    ("form", "options", "exact"),
    [
        ("PNG", {}, True),
        ("WEBP", {"lossless": True}, True),
        ("JPEG", {"quality": 95, "subsampling": 0}, False),
        ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, False),
        ("GIF", {}, False),
    ],
)
def test_each_format_is_decoded_to_rows_of_rgb(form, options, exact):
    image = gradient()
    data = encoded(image, form, **options)
    width, height, pixels, _ = decode_picture(data, LIMITS)
    assert (width, height, len(pixels)) == (16, 8, 3 * 16 * 8)
    worst = max(abs(a - b) for a, b in zip(pixels, image.tobytes(), strict=True))
    assert worst == 0 if exact else worst < 40


def test_only_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_picture(data, LIMITS).pixels == bytes([255, 0, 0]) * 16


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_transparency_becomes_white(form):
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert decode_picture(encoded(image, form), LIMITS).pixels == b"\xff" * 48


def test_half_transparency_is_mixed_with_white():
    data = encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 128)), "PNG")
    assert decode_picture(data, LIMITS).pixels == bytes([127]) * 3


@pytest.mark.parametrize("transparent", [False, True])
def test_palettes_keep_their_colors(transparent):
    image = Image.new("P", (2, 1))
    image.putpalette([9, 8, 7, 60, 50, 40])
    image.putdata([0, 1])
    data = encoded(image, "PNG", **({"transparency": 0} if transparent else {}))
    first = [255, 255, 255] if transparent else [9, 8, 7]
    assert decode_picture(data, LIMITS).pixels == bytes([*first, 60, 50, 40])


def test_gray_of_16_bits_keeps_its_range():
    image = Image.new("I;16", (3, 1))
    for x, value in enumerate((0, 32_896, 65_535)):
        image.putpixel((x, 0), value)
    pixels = decode_picture(encoded(image, "PNG"), LIMITS).pixels
    assert list(pixels) == [0, 0, 0, 128, 128, 128, 255, 255, 255]


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_gray_becomes_rgb(mode):
    assert decode_picture(encoded(Image.new(mode, (1, 1), "white"), "PNG"), LIMITS).pixels == b"\xff" * 3


def test_cmyk_is_not_inverted():
    data = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    red, green, blue = decode_picture(data, LIMITS).pixels[:3]
    assert red > 200
    assert max(green, blue) < 60


def test_the_orientation_of_a_photo_is_applied():
    image, exif = gradient(), Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    turned = decode_picture(encoded(image, "PNG", exif=exif), LIMITS)
    assert turned == Picture.of(8, 16, image.transpose(Image.Transpose.ROTATE_270).tobytes())


def test_low_detail_reduces_the_longer_side():
    data = encoded(Image.new("RGB", (2 * LOW_SIDE, 8)), "PNG")
    assert decode_picture(data, PictureLimits(1 << 20, 1 << 20), low=True)[:2] == (LOW_SIDE, 4)
    assert decode_picture(encoded(gradient(), "PNG"), LIMITS, low=True)[:2] == (16, 8)


@pytest.mark.parametrize(("width", "height"), [(101, 100), (60_000, 60_000), (2**31 - 1, 1)])
def test_too_many_pixels_are_refused_before_decoding(monkeypatch, width, height):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("it was decoded"))
    with pytest.raises(BadPicture, match="pixels"):
        decode_picture(bomb(width, height), LIMITS)


def test_too_many_bytes_are_refused_with_the_limit():
    with pytest.raises(BadPicture, match="has 101 bytes; at most 100 are allowed"):
        decode_picture(b"x" * 101, PictureLimits(100, 100))


def test_many_scans_of_a_jpeg_file_are_refused():
    data = encoded(gradient(), "JPEG", progressive=True)
    at = data.rindex(b"\xff\xda")
    with pytest.raises(BadPicture, match="scans"):
        decode_picture(data[:at] + data[at:-2] * (MOST_SCANS + 1) + data[-2:], LIMITS)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"<svg/>", b"%PDF-1.7", b"BM" + bytes(60), b"II*\0" + bytes(60), b"RIFF0000AVI 0000"],
)
def test_other_formats_are_refused_by_name(data):
    with pytest.raises(BadPicture, match="no image in PNG, JPEG, WebP or GIF"):
        decode_picture(data, LIMITS)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_is_cut_off_is_refused(form):
    noise = Image.frombytes("RGB", (32, 32), random.Random(1).randbytes(3072))
    data = encoded(noise, form)
    for size in (len(data) // 4, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(BadPicture, match=f"the {form} file cannot be"):
            decode_picture(data[:size], LIMITS)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_broken_files_give_pixels_or_a_reason_and_nothing_else(form):
    chance, data, reasons = random.Random(2), encoded(gradient(), form), set()
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            width, height, pixels, _ = decode_picture(bytes(broken), LIMITS)
        except BadPicture as refused:
            reasons.add(str(refused))
        else:
            assert len(pixels) == 3 * width * height
    assert reasons
    assert not any("object at 0x" in reason for reason in reasons)


# -- in processes: equal to the same process, and none of its failures reaches the server


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
        patch.setattr("headrace.text.images.decoder_limits", lambda within: limits)
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
