"""The pure core: requests, sequences, blocks, plans, policies and the loop.

Nothing here reads a clock, opens a file, draws a random number or imports torch. Time comes in as the argument
``now`` (seconds), the device as a `Runner`, and everything that happens leaves as an `Event`.

Read in this order:

- `engine`: the loop. `request`, `sequence`, `plan`, `events`: the values it works on.
- `ports`: what the core needs from outside. `knobs`: settings that may change while running, for all requests at once.
- `constraint`: what the text of an answer must look like.
- `embedding`: inputs of embedding models, which are computed together, and their events.
- `adapters`: that an adapter is on the device before its request starts.
- `sleep`: the states of a model that may sleep.
- `peers`: other servers that hold blocks, and what happened with them.
- `recovery`: what is computed again after the memory of the engine was lost.
- `images`: which positions of a prompt images fill, and what stands for them in keys.
- `block_keys`, `capacity`: content keys of blocks; how many blocks a request needs.
- `scheduler`: what a step computes. `queueing`, `tenancy`: which request is next. `memory`: paged KV memory.
- `prediction`: step times and output lengths.
- `drafting`: which tokens speculative decoding proposes, and how many of them it verifies.
"""
