"""Options whose values are JSON objects, checked key by key.

- `readers`: reads an object and the values of its keys.
- `speculation`: ``--speculative-config``. `kv_events`: ``--kv-events-config``.
  `kv_transfer`: ``--kv-transfer-config``. `generation`: ``--override-generation-config``.
"""
