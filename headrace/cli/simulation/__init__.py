"""Commands that run the engine in virtual time: ``simulate``, ``plan`` and ``replay``.

- `simulate`: runs a workload on a simulated device. `flags`: its flags. `report`: its tables and plots.
  `trial`: an experiment in virtual time. `speculation`: drafts.
- `plan`: sizes a fleet. `confirm`: simulates one for it. `replay`: replays a recorded scheduler trace.
"""
