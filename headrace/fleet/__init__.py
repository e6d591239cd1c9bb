"""Several devices and several servers: one model in ranks (tensor and pipeline parallel), KV blocks between servers.

`kv_transfer` moves blocks between servers; `dynamo` is a worker of NVIDIA Dynamo. A rank is a process with a part of
the model:

```
 rank 0: engine, runner, part 0 ──plans as bytes──> rank 1: part 1 · rank 2: part 2 · …
                        └────── sums, states, logits, tokens (gloo or NCCL) ──────┘
```
Core and runner are the same as in one process; only rank 0 samples. In reading order:

- `messages`: the configuration of a rank, and plans as bytes.
- `collectives`: communication between ranks within a step, over torch.distributed.
- `leader`: rank 0.
- `worker`: any other rank, and its process.
- `others`: the other ranks as rank 0 sees them, and those that it starts on its machine.
- `launched`: those that a launcher started, as both sides see it; they prove the shared secret first.
- `kv_transfer`: KV blocks between servers, each with the whole model.
"""
