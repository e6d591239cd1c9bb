"""Tells routers which blocks the prefix cache holds: vLLM's KV events over ZeroMQ (extra ``kv-events``).

- `changes`: what the prefix cache gained and lost since it was last asked. `wire`: that as bytes.
- `publisher`: sends it, and sends past batches again to who asks.
"""
