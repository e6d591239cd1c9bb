"""Workloads: requests as frozen values, drawn from a seed, equal for every target. In reading order:

- `work`: one request; `arrivals`, `lengths`: arrival times, and lengths of prompts and outputs.
- `tokens`, `chats`, `files`, `dataset`: workloads of token ids, of chats, from files, and all by name.
- `call`, `traces`, `population`, `reshape`, `synthesis`: requests without text: traces, synthetic tenants, and their
  tokens.
- `bound`: the maximum gain of continuous batching on a workload.
"""

from headrace.lab.workload.work import Message, Prompt, Work

__all__ = ["Message", "Prompt", "Work"]
