"""The batches of a server in tests: a port that answers at once, a clock that is set, and files to read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.api.batch.batches import Batches, Bounds
from headrace.api.batch.lines import BatchRequest
from headrace.api.batch.runs import Busy, Reply
from headrace.api.batch.store import BatchRecord, Limits
from tests.doubles.clock import Clock

LIMITS = Limits(files=100, nbytes=1 << 20, batches=10)
BOUNDS = Bounds(file_bytes=1 << 20, line_bytes=1 << 16, lines=1000, concurrency=4)
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


class FakePort:
    """Answers lines: those whose prompt begins with ``bad`` get status 400, ``busy`` ones are refused at first."""

    def __init__(self) -> None:
        self.ran = Counter[str]()
        self.order: list[str] = []
        self.classes: set[str] = set()
        self.tenants: set[str] = set()
        self.stops = False
        self.open = asyncio.Event()
        self.open.set()
        self.open_lines = 1_000_000  # later ones wait for `open`
        self.blocked: set[str] = set()  # classes whose lines wait for idle time
        self.broken = False
        self.running = self.most_running = 0

    def draining(self) -> bool:
        return self.stops

    async def run(self, line: BatchRequest, tenant: str, service_class: str) -> Reply:
        prompt = line.body["prompt"]
        self.ran[prompt] += 1
        if prompt.startswith("busy") and self.ran[prompt] < 3:
            raise Busy(0.0)
        if self.broken:
            raise ConnectionError("the engine has failed")
        self.order.append(line.custom_id)
        if len(self.order) > self.open_lines:
            self.open.clear()
        self.classes.add(service_class)
        self.tenants.add(tenant)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            while service_class in self.blocked:
                await asyncio.sleep(0.005)
            await self.open.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        status = 400 if prompt.startswith("bad") else 200
        return Reply(status, "req_1", {"text": prompt, "usage": USAGE if status == 200 else None})


def input_lines(prompts: list[str], **changes: Any) -> bytes:
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        | changes
        for n, prompt in enumerate(prompts)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def add_file(batches: Batches, raw: bytes, tenant: str = "t") -> str:
    async with batches.upload(tenant) as upload:
        upload.write(raw)
        return (await batches.add_file(tenant, upload, "in.jsonl", None)).id


async def begin(batches: Batches, raw: bytes, tenant: str = "t", window: int = 86_400, **more: Any) -> str:
    """Upload an input file and create its batch."""
    id = f"batch_{len(await batches.batches(tenant, limit=99, after=None))}{tenant}"
    file = await add_file(batches, raw, tenant)
    now = int(batches.clock())
    await batches.create(BatchRecord(id, tenant, "/v1/completions", file, "24h", window, now, **more))
    return id


async def until(batches: Batches, id: str, *statuses: str, tenant: str = "t") -> BatchRecord:
    """Wait for a batch to be in one of the states."""
    for _ in range(30_000):
        batch = await batches.batch(tenant, id)
        if batch.status.value in statuses:
            return batch
        await asyncio.sleep(0.002)
    raise AssertionError(f"{id} is {batch.status}, not {statuses}")


async def when(condition: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the condition never came true")


def results(folder: Path, id: str) -> list[dict[str, Any]]:
    """What an output file holds; nothing where there is none."""
    path = folder / "contents" / id
    return [json.loads(raw) for raw in path.read_bytes().splitlines()] if id and path.exists() else []


def batches_in(folder: Path, port: FakePort, clock: Clock, limits: Limits = LIMITS) -> Batches:
    return Batches(folder, port, limits, BOUNDS, clock)
