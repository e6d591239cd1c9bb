import pytest

from headrace.core.events import Layer
from headrace.core.request import FinishReason
from headrace.response_cache.lookup import cache_header
from headrace.response_cache.rules.entry import Entry, Hit, Miss

ENTRY = Entry((1,), FinishReason.STOP, 1, 1.0, 0.0, 1.0, 1.0)
EXACT = Hit(ENTRY, Layer.EXACT, b"k", 12.4)
NEAR = Hit(ENTRY, Layer.SEMANTIC, b"k", 3.0, 0.9712)


@pytest.mark.parametrize(
    ("layers", "hits", "words"),
    [
        ([None], [Miss()], "miss"),
        ([Layer.PARTIAL], [Miss()], "partial"),
        ([Layer.COALESCED], [Miss()], "coalesced"),
        ([Layer.EXACT], [EXACT], "hit; layer=exact; age=12"),
        ([Layer.SEMANTIC], [NEAR], "hit; layer=semantic; age=3; similarity=0.971"),
        ([Layer.EXACT, Layer.SEMANTIC], [EXACT, NEAR], "hit; layer=exact+semantic; age=12; similarity=0.971"),
        ([Layer.EXACT, None], [EXACT, Miss()], "miss"),
        ([Layer.EXACT, Layer.PARTIAL], [EXACT, Miss()], "partial"),
        ([Layer.EXACT, Layer.COALESCED], [EXACT, Miss()], "coalesced"),
    ],
)
def test_a_call_is_a_hit_only_where_nothing_of_it_was_computed(layers, hits, words):
    assert cache_header(layers, hits) == words
