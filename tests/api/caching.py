"""A road with an exact cache in memory, for tests of what clients see of it."""

from __future__ import annotations

from headrace.core.request import Request
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service

FINGERPRINT = Engine("fox", "", "", "", "", "").fingerprint()


def with_memory(service: Service) -> CacheLookup:
    return CacheLookup(service, ExactCache([Tier(MemoryStore(1 << 20))], TagVersions()), FINGERPRINT)


class RequestsNoted(CacheLookup):
    """Without a cache; it keeps the requests that it is asked to answer."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.requests: list[Request] = []

    async def open(self, questions, interval=1, paced=False):
        self.requests += [question.request for question in questions]
        return await super().open(questions, interval, paced)
