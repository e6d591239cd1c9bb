"""Builds the operational parts of a server: logs and traces, reloads, recordings, experiments.

- `observability`: logs and traces. `reload`: new keys and tenants without a restart.
- `folds`: the folds over the engine's events.
- `recording`: recordings of the engine's decisions.
- `stepping`: the steps of the server, and timelines of requests.
- `kv_events`: publishes the contents of the prefix cache for routers.
- `dry_runs`: experiments on a simulation of the server.
- `tuning`: experiments and the tuner. `request_settings`: the settings of requests that they may compare.
- `rehearsals`: the process in which the tuner rehearses.
- `dashboard`: the pages in the browser. `first_requests`: warm-up requests.
"""
