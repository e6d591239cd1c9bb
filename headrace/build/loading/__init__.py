"""Builds the parts of a loaded model from the options.

- `text`: tokenizer, chat templates and sampling defaults.
- `computing`: the decoder: device, dtype, kernels and weights; or one rank's part, and the other ranks.
- `ranks`: starts the other ranks, and checks options that several ranks do not support.
- `draft_models`: draft models and heads. `tiers`: host memory and disk below the device.
- `kv_transfer`: KV transfer with other servers.
- `memory`: sizes and allocates the KV cache, the tiers, the runner and its graphs.
"""
