"""Paged KV memory: blocks and their content in each tier, and the eviction order.

- `block_pool`: the device's blocks, their reference counts, and the prefix cache over them.
- `block_table`: the blocks of each running sequence.
- `content`: the port for listeners to changes of the prefix cache.
- `eviction`: eviction order and policies.
- `retention`: retention priority that a request asked for.
- `prefix_hit`: the result of a prefix lookup.
- `tiers`: host memory, disk and peers below the device. `lower_tier`: one of them.
- `claims`: host blocks pinned for waiting requests, and the copies that these wait for.
- `peer_blocks`: blocks that other servers hold.
- `restore`: fetch from a lower tier or compute again.
- `fence`: blocks that a launched step may still write to.
"""
