"""A bounded load that makes every part of a server report: tenants, streams, caches, queues, refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

TENANTS = ("acme", "globex", "initech")
CAPPED = "capped"
"""A tenant with one request a minute."""

TENANTS_FILE = f"tenants: {{{CAPPED}: {{requests_per_minute: 1}}}}\n"
CONCURRENT = 24

MISSES = {
    "prompt": "A long story",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0.9,
    "slo": {"ttft_ms": 1},
}
MEETS = MISSES | {"max_tokens": 2, "slo": {"ttft_ms": 600_000}}


def bodies(wave: int) -> list[tuple[str, dict]]:
    """The requests of a wave, each with its tenant: equal for equal waves, new prompts in the next."""
    made: list[tuple[str, dict]] = []
    for index in range(36):
        tenant = TENANTS[index % len(TENANTS)]
        opening = f"Wave {wave}. {tenant}: once upon a time there was a fox who lived by the river. " * 3
        story = {"prompt": f"{opening} Story {index // 6}.", "max_tokens": 24, "ignore_eos": True}
        made.append((tenant, story | {"temperature": 0, "stream": index % 2 == 0}))  # twice each: cached
        made.append((tenant, story | {"temperature": 1.0}))  # never cached: sampled without a seed
    made += [(CAPPED, {"prompt": "Hello", "max_tokens": 1})] * 2
    made += [("acme", MISSES)]
    return made


def send(url: str, wave: int) -> dict[int, int]:
    """Send a wave and read every answer; how many answers had which status."""
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(CONCURRENT) as pool:

        def ask(tenant: str, body: dict) -> int:
            return client.post("/v1/completions", json=body, headers={"X-Tenant-Id": tenant}).status_code

        for text in ("a fox", "a river"):
            body = {"model": "builtin", "input": [f"Wave {wave}: {text}"]}
            assert client.post("/v1/embeddings", json=body).status_code == 200
        for beginning in ("One", "Two"):  # the other first word has the whole prompt computed again
            body = {"prompt": f"{beginning}. " + "Once upon a time there was a fox. " * 40, "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
        for status in pool.map(lambda each: ask(*each), bodies(wave)):
            statuses[status] = statuses.get(status, 0) + 1
        assert ask("globex", MEETS) == 200  # after the others: in a full queue it could be refused
    return statuses
