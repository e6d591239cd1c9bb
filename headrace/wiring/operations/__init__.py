"""Builds the operational parts of a server: logs and traces, reloads, recordings, experiments.

- `observability`: logs and traces. `reload`: new keys and tenants without a restart.
- `folds`: the folds over the engine's events.
- `recording`: recordings of the engine's decisions.
- `stepping`: the steps of the server, and timelines of requests.
- `kv_events`: publishes the contents of the prefix cache for routers.
- `tuning`: experiments and the tuner, and dry runs on a simulation of the server.
- `dashboard`: the pages in the browser. `first_requests`: warm-up requests.
"""
