"""Workloads: requests as frozen values, drawn from a seed, equal for every target. In reading order:

- `work`: one request, with its prompt or as a call without text.
- `dataset`: workloads of token ids, of chats and from files, by name.
- `traces`, `population`: recorded traces; arrival times, lengths and synthetic tenants.
"""

from headrace.lab.workload.work import Message, Prompt, Work

__all__ = ["Message", "Prompt", "Work"]
