"""Executes step plans: models, kernels, sampling, the runner. It uses torch and does not depend on the scheduler.

Its floors, lowest first; each file or folder imports only those on lower floors, or before it on its own:

1. The machine and the values of a step.
   - `device`: facts of the machine: device, dtype, threads, free memory, limits of a container; returns what steps
     have freed.
   - `shared_keys`: groups of rows that begin with the same keys. `batch`: the rows of a step, packed, and the interrupt
     of background work. `transfer`: copies between host and device.
   - `parallel`: communication between the ranks of a parallel model.
   - `memory_clearing`: clears the pool's memory ahead of its use.
     `blockfile`: blocks and checkpoints of states in files on disk.
2. What the operations work on, and their definitions in torch.
   - `checkpoint`: the files of a model, and where in them its linear layers are. `quantization`: weights in 4
     and 8 bits, and their formats on disk.
   - `sampling`: from logits to tokens.
3. The operations.
   - `kernels`: the operations of the decoder, by backend.
   - `slots`: tokens and block tables of each running sequence, on the device. `states`: recurrent states of slots and
     checkpoints.
   - `grammar`: grammars of structured output and their token masks.
4. Models.
   - `model`: the decoder, its weights, and its paged keys and values.
   - `adapters`: LoRA adapters: their files, and their places in memory.
   - `adopted`: models of another library on the same kernels. `encoder`: vectors of texts and scores of pairs.
   - `images`: images in prompts: their encoders, and their rows in a step.
   - `quantizing`: writes a quantized copy of a model.
   - `mover`: copies blocks between device, host and disk. `memory_plan`: sizes weights, activations and KV at start-up.
5. Steps.
   - `results`: the results of a step on their way from the device. `step_sampling`: from a step's states to its tokens.
   - `drafting`: a second model that proposes tokens. `graphs`: decode steps that a device records once and replays.
   - `runner`: executes a plan: one packed forward pass, one sampled token per row, or more for drafts. Start here.
"""
