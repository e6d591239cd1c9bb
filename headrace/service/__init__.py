"""The engine's thread and its mailbox: requests in, events out to their listeners.

- `service`: admits requests and routes their events. `answer`: the events of one call. `thread`: the engine thread.
- `step_watch`: attaches a fold only while it is read.
- `health_watch`: logs stalls. `systemd`: notifies systemd.
- `takeover`: waits for a folder that the previous process still holds.
- `file_watch`: calls a function when files have changed.
- `sampling_defaults`: sampling parameters of requests that give none.
- `usage_file`: adds usage to a file. `sessions`: retains the computed prompts of sessions.
- `intake`: takes large calls in piece by piece.
- `quota_meter`: counts usage against limits. `admission_rate`: admissions per second.
- `embedding`: embeddings and scores, computed between steps.
"""
