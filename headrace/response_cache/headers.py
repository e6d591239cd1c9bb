"""The response header ``X-Headrace-Cache``: which caches answered, the age of the response, its similarity."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.events import Layer
from headrace.response_cache.rules.entry import Hit, Miss


def cache_header(layers: Sequence[Layer | None], hits: Sequence[Hit | Miss]) -> str:
    """The header's value for a call; ``layers`` has the cache layer that answers each sequence (None: the engine).

    The value is a hit only if no sequence of the call is computed.
    """
    if None in layers:
        return "miss"
    if Layer.PARTIAL in layers:
        return "partial"
    spared = {str(hit.layer) for hit in hits if isinstance(hit, Hit)}
    if not spared or Layer.COALESCED in layers:
        return "coalesced"
    age = max(hit.age_seconds for hit in hits if isinstance(hit, Hit))
    words = f"hit; layer={'+'.join(sorted(spared))}; age={age:.0f}"
    near = [hit.similarity for hit in hits if isinstance(hit, Hit) and hit.similarity is not None]
    return f"{words}; similarity={min(near):.3f}" if near else words
