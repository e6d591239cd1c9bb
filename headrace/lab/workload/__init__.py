"""Workloads: requests as frozen values, drawn from a seed, equal for every target. In reading order:

- `work`: one request. `distributions`: arrival times, and lengths of prompts and outputs.
- `dataset`: workloads of token ids, of chats and from files, by name.
- `call`, `traces`, `population`: requests without text: their tokens, recorded traces, and synthetic tenants.
- `bound`: the maximum gain of continuous batching on a workload.
"""

from headrace.lab.workload.work import Message, Prompt, Work

__all__ = ["Message", "Prompt", "Work"]
