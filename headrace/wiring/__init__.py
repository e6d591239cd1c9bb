"""The composition root: the only package that imports every class and reads every option. It passes to each class only
what it needs.

- `server`: the HTTP server: what is loaded, the features in order, start and end. `feature`: what a feature adds.
- `models`: a server of several models. `model_server`: the process of one of them.
- `front_ends`: several front ends before one server, and the process of one of them.
- `generation`: a model that generates text, behind its service and caches, and its features: LoRA adapters, sleep.
- `pooling`: embeddings and reranking in the server. `embedding`: loads their models.
- `engine`: the engine and its policies from the options, without torch; the simulator runs the same engine.
- `plugins`: classes of other packages.
- `model`: a loaded model and its engine, and the warm-up requests. `loading`: its parts: weights, memory, the
  other ranks.
- `controls`: what a server reads and changes of its engine. `engine_process`: an engine in a process of its own.
- `images`: images in prompts. `image_encoding`: encodes them between the steps. `remote_images`: in an engine process.
- `memory_sleep`: frees and restores the memory of a model that sleeps.
- `drafting`: the drafter of speculative decoding.
- `tenants`: tenants and service classes from their file; API keys.
- `caches`: the response caches and cache warming; normalization and explanation of prompts, and sessions.
- `observability`: folds, logs, traces, and KV events for routers. `pages`: the dashboard, steps and timelines.
- `reload`: new keys and tenants without a restart. `recording`: recordings of the engine's decisions.
- `tuning`: experiments and the tuner of a server, and dry runs.
- `simulation`: an engine on a simulated device. `step_documents`: small runs step by step, simulated or recorded.
- `engine_tuning`: experiments and the tuner of one engine. `dry_run`: the same in virtual time.
- `evaluator`: runs settings on one loaded model or simulated device, for sweeps and tuning.
- `estimate`: what the caches would save on a log of requests, by tokenizer and rules without weights.
- `quantizing`: quantizing a checkpoint and measuring its quality.
"""
