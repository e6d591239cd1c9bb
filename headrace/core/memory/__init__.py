"""Paged KV memory: which block holds what, in which tier, and which content is evicted first.

- `block_pool`: the device's blocks, their reference counts, and the prefix cache over them.
- `block_table`: the blocks of each running sequence.
- `content`: the port for who wants to hear what the prefix cache holds.
- `eviction`: eviction order and policies.
- `retention`: retention priority that a request asked for.
- `prefix_hit`: the result of a prefix lookup.
- `tiers`: host memory, disk and peers below the device. `lower_tier`: one of them.
- `claims`: blocks in host memory that waiting requests will start with, and the copies that they wait for.
- `peer_blocks`: blocks that other servers hold.
- `restore`: fetch from a lower tier or compute again.
- `fence`: blocks that a launched step may still write to.
"""
