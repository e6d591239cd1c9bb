"""Sampled answers without a seed: several are kept and one is served, so that the distribution stays one."""

from __future__ import annotations

import hashlib


def slot_key(key: bytes, slot: int) -> bytes:
    """The key of the sample number ``slot`` among those of ``key``."""
    return hashlib.sha256(b"headrace/sample" + key + slot.to_bytes(4, "little")).digest()


def slot_served(seed: int, samples: int) -> int:
    """Which of ``samples`` to serve: uniform over seeds; a call's answers, whose seeds follow each other, differ."""
    return seed % samples
