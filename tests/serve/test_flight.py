import asyncio

from headrace.serve.stores.memory import MemoryStore
from tests.serve.test_recall import house


def test_an_answer_is_read_before_it_is_kept(monkeypatch):
    order = []

    async def put(self, key, value, ttl, tags):
        order.append("kept")

    monkeypatch.setattr(MemoryStore, "put", put)

    async def run():
        async with house() as h:
            answer = await h.open(h.question(), interval=0)
            await answer.read()
            order.append("read")
            await h.settle()
            assert order == ["read", "kept"]

    asyncio.run(run())
