"""Builds what operates a server: logs and traces, reloads, recordings, warming, experiments.

- `observability`: logs and traces. `reload`: new keys and tenants without a restart.
- `recording`: recordings of the engine's decisions.
- `warming`: the request history and cache warming.
- `tuning`: experiments and the tuner.
"""
