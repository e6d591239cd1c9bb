"""One compiler of a request: from a typed body to requests of the engine, in four stages over one draft.

- `fields`: the request fields that the dialects share, each with its kind. `bodies`: the two bodies that are compiled.
- `markers`: per-request text that breaks shared prefixes; `normalization` moves or removes it.
- `pictures`: the images of conversations.
- `policies`: what a server has settled about requests.
- `model`: the served model. `call`: a call in progress.
- `draft`: the value that travels.
- `render`, `encode`, `constrain`, `submit`: the stages. `submit`, the last one, has their order, in which doors meet.
- `outline`: which message or section a token of a prompt belongs to.
"""
