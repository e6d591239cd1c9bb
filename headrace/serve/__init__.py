"""The server: the engine thread, text processing, caches and the HTTP API.

- `service`: admits requests and routes their events. `answer`: the events of one call. `thread`: the engine thread.
- `step_watch`: attaches a fold only while it is read.
- `health_watch`: logs stalls. `systemd`: notifies systemd.
- `takeover`: waits for a folder that the previous process still holds.
- `file_watch`: calls a function when files have changed.
- `sampling_defaults`: sampling parameters of requests that give none.
- `usage_file`: adds usage to a file.
- `experiments`: runs experiments and the tuner. `sessions`: retains the computed prompts of sessions.
- `intake`: takes large calls in piece by piece.
- `quota_meter`: counts usage against limits. `admission_rate`: admissions per second. `auth`: API keys.
- `text`: tokenizer, chat template, detokenizer. `parsing`: tool calls and reasoning in a model's text.
- `structured`: constraints for structured output.
- `embedding`: embeddings and scores, computed between steps.
- `cache`: response caches. `http`: the API. `batch`: batches from files.
"""
