import gzip
import zlib

import pytest

from headrace.api.content_encoding import PIECE_BYTES, DecodedTooLong, decoded, decoders_of


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
