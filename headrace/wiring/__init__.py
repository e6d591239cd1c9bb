"""The composition root: the only package that imports every class and reads every option. It passes to each class only
what it needs.

- `engine`: the engine from its options, without torch; the simulator runs the same engine.
- `policies`: the policies that the options name. `plugins`: classes of other packages.
- `model`: a loaded model and its engine. `loading`: its parts: weights, memory, drafts, the other ranks.
- `tenants`: tenants and service classes from their file; API keys.
- `drafting`: the drafter of speculative decoding.
- `pooling`: embedding and reranking models, and a server that has only these.
- `caching`: the response caches and cache warming; normalization and explanation of prompts, and sessions.
- `server`: the HTTP server in front of a loaded model.
- `operations`: logs, reloads, recordings, experiments.
- `simulation`: an engine on a simulated device. `films`: small runs step by step, simulated or recorded.
- `engine_tuning`: experiments and the tuner of one engine. `dry_run`: the same in virtual time.
- `evaluator`: runs settings on one loaded model or simulated device, for sweeps and tuning.
- `quantizing`: quantizing a checkpoint and measuring its quality.
"""
