"""Headrace as a worker of NVIDIA Dynamo, which routes requests among workers (extra ``dynamo``).

```
 Dynamo's frontend: HTTP, chat template, tokenizer, router ──> backend ──> answering ──> serve.service ──> engine
                                                     └──────── reads KV events ──────────────────────────────┘
```
``python -m headrace.fleet.dynamo MODEL`` starts one. In reading order:

- `wire`: Dynamo's requests as ours, and our tokens as its chunks.
- `answering`: answers from a service.
- `backend`: the class that Dynamo drives.
"""
