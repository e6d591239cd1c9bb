"""Sample pools: several cached responses to one unseeded request, of which one is served, which keeps the
distribution.
"""

from __future__ import annotations

import hashlib


def slot_key(key: bytes, slot: int) -> bytes:
    """The key of sample number ``slot`` of the request with ``key``."""
    return hashlib.sha256(b"headrace/sample" + key + slot.to_bytes(4, "little")).digest()


def slot_served(seed: int, samples: int) -> int:
    """Which of ``samples`` to serve: uniform over seeds. The responses of one call differ, because their seeds are
    consecutive.
    """
    return seed % samples
