"""The engine's thread and its mailbox: requests in, events out to their listeners.

- `service`: admits requests and routes their events. `answer`: the events of one call, and how
  many tokens share one under load. `thread`: the engine thread.
- `engine_process`: an engine in a process of its own. `engine_host`: runs it there. `packing`: their messages.
- `model_servers`: the processes of a server of several models.
- `open_requests`: what another process computes after one was lost.
- `embedding_worker`: computes embeddings and scores between steps. `embedding_models`: its models and their inputs.
  `remote_pooling`: in an engine process.
- `adapters`: LoRA adapters by their names. Also those of an engine process.
- `sleep`: requests of a model that sleeps.
- `images`: what a model that takes images offers to the compiler of requests.
- `quota_meter`: counts usage against limits. `usage_file`: adds usage to a file.
- `sampling_defaults`: sampling parameters of requests that give none.
- `sessions`: retains the computed prompts of sessions.
- `health_watch`: logs stalls and notifies systemd.
- `takeover`: waits for a folder that the previous process still holds.
- `background`: the end of background tasks.
- `file_watch`: calls a function when files have changed.
"""
