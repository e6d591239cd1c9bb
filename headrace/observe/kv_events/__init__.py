"""Publishes the blocks of the prefix cache for routers: vLLM's KV events over ZeroMQ (extra ``kv-events``).

- `changes`: blocks added to and removed from the prefix cache since the last read. `wire`: their encoding.
- `publisher`: publishes the changes, and resends past batches on request.
"""
