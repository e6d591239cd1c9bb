"""Simulation of the engine in virtual time: what clients would measure on a given device. Files in reading order:

- `runner`: the work of a step, the time that a device and the HTTP front end take, simulated execution, and requests
  with their outputs.
- `fleet`: one simulated engine, alone also as a target of `lab.bench`; several behind a router, also with prefill and
  decode on different ones.
- `tally`: figures of a run.
"""
