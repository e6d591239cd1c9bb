"""What all endpoints that generate text share.

- `fields`, `scheduling_fields`, `kv_fields`, `unsupported`: request fields. `sampling`: fields to sampling parameters.
- `caller`: the client of a call. `names`: fields in errors by the names of the dialect.
- `call`: one API call in progress. `choices`: the output of one sequence while it grows.
- `serving`: the model, the caches and the limits that all of these endpoints share.
- `writing`, `logprobs`, `usage`: response JSON. `call_notes`: finds calls by their ids.
"""
