"""The backend in Triton for GPUs, which needs no compiler but torch's own; its interpreter tests it on a CPU.

- `backend`: the backend, and all layers by its kernels.
- `attention`: paged attention on the device. `launches`: its tiles.
- `elementwise`: norms, rotations, activations, the embedding.
- `linear`: products with quantized weights. `quantized`: which product a weight takes.
- `experts`: routers and grouped products of experts. `mixtures`: their launches.
- `adapters`: LoRA adapters. `adapting`: their launches.
- `recurrent`: mixers with a recurrent state. `mixing`: their launches.
- `sampling`: the choice of tokens.
- `agreement`: whether all of them give what torch's operations give, before `auto` uses them.
- `target`: the device as the launches see it, and torch's products in fp8 on it.
"""
