"""Headrace as a worker of NVIDIA Dynamo, which routes requests among workers (extra ``dynamo``).

```
 Dynamo's frontend: HTTP, chat template, tokenizer, router ──> backend ──> answering ──> service ────────> engine
                                                     └──────── reads KV events ──────────────────────────────┘
```
``python -m headrace.fleet.dynamo MODEL`` starts one. In reading order:

- `answering`: converts Dynamo's requests, serves them with a service, and converts their tokens to chunks.
- `backend`: the engine class for Dynamo's worker.
"""
