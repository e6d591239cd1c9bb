"""What a loaded model is made of, from the options.

- `computing`: the decoder: device, dtype, kernels and weights; or a part of it, and the other ranks.
- `ranks`: how the other ranks start, and what several ranks cannot do.
- `draft_models`: draft models and heads. `tiers`: host memory and disk below the device.
- `kv_transfer`: the exchange of KV blocks with other servers.
- `memory`: sizes and opens the KV cache, the tiers, the runner and its graphs.
"""
