"""A road with an exact cache in memory, for tests of what clients see of it."""

from __future__ import annotations

from headrace.core.cache.key import Engine
from headrace.core.cache.versions import Versions
from headrace.serve.exact import ExactCache
from headrace.serve.recall import Recall
from headrace.serve.service import Service
from headrace.serve.stores.memory import MemoryStore
from headrace.serve.stores.tier import Tier

FINGERPRINT = Engine("fox", "", "", "", "", "").fingerprint()


def with_memory(service: Service) -> Recall:
    return Recall(service, ExactCache([Tier(MemoryStore(1 << 20))], Versions()), FINGERPRINT)
