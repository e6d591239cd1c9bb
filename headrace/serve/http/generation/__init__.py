"""What all endpoints that generate text share.

- `fields`, `scheduling_fields`, `kv_fields`, `unsupported`: request fields. `sampling`: fields to sampling parameters.
- `caller`: the client of a call.
- `call`: one API call in progress. `choices`: the answer of one sequence while it grows.
- `serving`: what every dialect's endpoints are made of.
- `writing`, `logprobs`, `usage`: response JSON. `call_notes`: what only the HTTP layer knows of a call.
"""
