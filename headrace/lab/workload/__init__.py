"""Requests to measure with: frozen values, drawn from a seed, equal for every target. In reading order:

- `work`: one request; `arrivals`, `lengths`: when requests arrive, and how long they are.
- `tokens`, `chats`, `files`, `dataset`: workloads of token ids, of chats, from files, and all by name.
- `call`, `traces`, `population`, `reshape`, `synthesis`: requests without text: traces, synthetic tenants, tokens for
them. - `bound`: the most that continuous batching can gain on a workload.
"""

from headrace.lab.workload.work import Message, Prompt, Work

__all__ = ["Message", "Prompt", "Work"]
