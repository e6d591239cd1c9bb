"""Headrace as a worker of NVIDIA Dynamo, which routes requests among workers (extra ``dynamo``).

```
 Dynamo's frontend: HTTP, chat template, tokenizer, router ──> backend ──> answering ──> serve.service ──> engine
                                                     └──────── reads KV events ──────────────────────────────┘
```
``python -m headrace.fleet.dynamo MODEL`` starts one. In reading order:

- `wire`: converts Dynamo's requests, and tokens to its chunks.
- `answering`: serves its requests with a service.
- `backend`: the engine class for Dynamo's worker.
"""
