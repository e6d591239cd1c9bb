import gzip
import zlib

import pytest

from headrace.api.body import PIECE_BYTES, DecodedTooLong, decoded, decoders_of

PATH = "/v1/completions"


@pytest.mark.parametrize("options", [{"max_body_bytes": 100}])
def test_a_body_may_be_as_long_as_the_limit_and_no_longer(house):
    raw = b'{"prompt": "x", "max_tokens": 1}'
    assert house.client.post(PATH, content=raw + b" " * (100 - len(raw))).status_code == 200
    refused = house.client.post(PATH, content=raw + b" " * (101 - len(raw)))
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("options", [{"max_body_bytes": 100}])
def test_a_body_of_undeclared_length_is_counted(house):
    assert house.client.post(PATH, content=iter([b" " * 60, b" " * 60])).status_code == 413


RAW = b'{"prompt": "x", "max_tokens": 1}'


def gzipped(data: bytes) -> bytes:
    """The same bytes at every call, which the names of tests need: without the time."""
    return gzip.compress(data, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    packed = zlib.compressobj(wbits=-15)
    return packed.compress(data) + packed.flush()


ENCODED = [
    ("gzip", gzipped(RAW)),
    ("GZip", gzipped(RAW)),
    ("x-gzip", gzipped(RAW)),
    ("gzip", gzipped(RAW[:9]) + gzipped(RAW[9:])),
    ("deflate", zlib.compress(RAW)),
    ("deflate", raw_deflate(RAW)),
    ("identity", RAW),
    ("", RAW),
    ("deflate, gzip", gzipped(zlib.compress(RAW))),
    ("gzip, identity,, deflate", zlib.compress(gzipped(RAW))),
    ("gzip, gzip, gzip, gzip", gzipped(gzipped(gzipped(gzipped(RAW))))),
]


@pytest.mark.parametrize(("encoding", "content"), ENCODED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_encoded_body_is_decoded(house, encoding, content, size):
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    for sent in (content, iter(parts)):
        answer = house.client.post(PATH, content=sent, headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "compress", "gzip, br", "aes128gcm", "x" * 500, ", ".join(["gzip"] * 5)]
)
def test_an_unknown_encoding_is_refused_with_those_that_are_accepted(house, encoding):
    answer = house.client.post(PATH, content=RAW, headers={"Content-Encoding": encoding})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        415,
        "unsupported_encoding",
        "Content-Encoding",
    )
    assert "gzip, deflate" in error["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", RAW),
        ("gzip", gzipped(RAW)[:-1]),
        ("gzip", gzipped(RAW)[:5]),
        ("gzip", gzipped(RAW) + b"more"),
        ("gzip", gzipped(RAW)[:-8] + b"\0" * 8),
        ("deflate", zlib.compress(RAW)[:-1]),
        ("deflate", zlib.compress(RAW) + b"more"),
        ("deflate", b"x"),
        ("deflate", gzipped(RAW)),
        ("gzip, deflate", gzipped(RAW)),
        ("deflate, gzip", gzipped(RAW)),
    ],
)
def test_a_broken_encoding_is_refused(house, encoding, content):
    answer = house.client.post(PATH, content=content, headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encoding")


def test_an_empty_body_is_empty_in_any_encoding(house):
    answer = house.client.post(PATH, content=b"", headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("options", [{"max_body_bytes": 1000}])
def test_the_limit_is_that_of_the_decoded_body(house):
    fits, exceeds = (gzipped(RAW + b" " * (length - len(RAW))) for length in (1000, 1001))
    headers = {"Content-Encoding": "gzip"}
    assert house.client.post(PATH, content=fits, headers=headers).status_code == 200
    answer = house.client.post(PATH, content=exceeds, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    empty = b"".join([gzipped(b"")] * 100)  # nothing when decoded, but too long itself
    assert house.client.post(PATH, content=iter([empty]), headers=headers).status_code == 413


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_bomb_ends_at_the_limit(layers):
    bomb = zlib.compress(bytes(50_000_000), 9)
    for _ in range(layers - 1):
        bomb = zlib.compress(bomb, 9)
    decoders = decoders_of(", ".join(["deflate"] * layers), 1_000_000)
    pieces = decoded(bomb, decoders)
    seen: list[int] = []
    with pytest.raises(DecodedTooLong):
        seen.extend(map(len, pieces))
    assert sum(seen) <= 1_000_000
    assert max(seen, default=0) <= PIECE_BYTES


def test_layers_of_a_bomb_are_limited_too():
    """The inner layer never ends its header, so it decodes to nothing."""
    endless = b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 5_000_000
    with pytest.raises(DecodedTooLong):
        list(decoded(gzip.compress(endless), decoders_of("gzip, gzip", 1_000_000)))
