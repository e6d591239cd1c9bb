"""Paged KV memory: blocks and their content in each tier, and the eviction order.

- `block_pool`: the device's blocks, their reference counts, and the prefix cache over them.
- `prefix_hit`: what a lookup found.
- `window_blocks`: blocks of window layers.
- `checkpoints`: saved recurrent states at block boundaries. `state_saves`: where sequences save and restore them.
- `content`: listeners to changes of that cache.
- `block_table`: the blocks of each running sequence, those of window layers too, how long they are retained, and when
  they become free: a step in flight may still write to them.
- `eviction`: eviction order and policies.
- `departure`: a bounded memory of recent prompts of each tenant: where a prompt leaves the cached prefix, why, and how
  many tokens were computed again. `sessions`: which blocks a newer prompt of a session replaces, and a limit for each
  tenant.
- `tiers`: host memory, disk and peers below the device; host blocks pinned for waiting requests, and the copies that
  these wait for. `lower_tier`: one of them.
- `restore`: fetch from a lower tier or compute again.
"""
