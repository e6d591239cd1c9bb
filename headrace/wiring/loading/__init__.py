"""Builds the parts of a loaded model from the options.

- `text`: tokenizer, chat templates and sampling defaults.
- `computing`: the decoder: finds the model, chooses device, dtype and kernels, and reads the weights: of this project's
  families, whole or one rank's part, or as transformers defines it. Draft models and heads.
- `ranks`: starts the other ranks, and checks options that several ranks do not support.
- `adapters`: LoRA adapters. `images`: what encodes images.
- `kv_transfer`: KV transfer with other servers.
- `memory`: sizes and allocates the KV cache, the tiers below it, the runner and its graphs; groups of window layers.
"""
