"""Simulation of the engine in virtual time: what clients would measure on a given device. Files in reading order:

- `work`, `device`: the work of a step, and the time that a device takes for it.
- `runner`, `front`, `replica`: simulated execution, HTTP server, engine.
- `handover`, `fleet`: prefill and decode on different replicas, and replicas behind a router.
- `target`: a simulated engine as a target of `lab.bench`.
- `requests`: the requests of a simulation with their outputs.
- `tally`, `timeline`, `outcome`, `plot`: figures of a run.
"""
