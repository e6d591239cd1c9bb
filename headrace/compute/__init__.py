"""Executes step plans: models, kernels, sampling, the runner. It uses torch and does not depend on the scheduler.

- `runner`: executes a plan: one packed forward pass, one sampled token per row, or more for drafts.
- `parallel`: communication between the ranks of a parallel model.
- `graphs`: decode steps that a device records once and replays.
- `results`: the results of a step on their way from the device.
- `slots`: tokens and block tables of each running sequence, on the device.
- `batch`: the rows of a step, packed.
- `kv`: paged keys and values of all layers.
- `step_interrupt`: interrupts a step of background work.
- `transfer`: copies between host and device.
- `mover`: copies blocks between device, host and disk.
- `blockfile`: blocks in a file on disk. `snapshot`: the list of its content.
- `memory_plan`: sizes weights, activations and KV cache at start-up.
- `memory_clearing`: clears the pool's memory ahead of its use.
- `device`: facts of the machine: device, dtype, threads, free memory.
- `cgroups`: limits of CPU and memory of a container or service.
- `model`: the decoder and its weights. `gguf`: models in files of llama.cpp.
- `adopted`: models of another library on the same kernels.
- `kernels`: the operations of the decoder, by backend.
- `grammar`: grammars of structured output and their token masks.
- `sampling`: from logits to tokens.
- `drafting`: a second model that proposes tokens.
- `quantization`: weights in 4 and 8 bits.
- `encoder`: sentence vectors for the semantic cache.
"""
