"""Workloads, benchmark, simulator, capacity planner, and replay: the core in virtual and in real time.

| package | content |
|---|---|
| `workload` | requests to measure with: synthetic ones, data sets, traces |
| `bench` | load generator, figures and tables |
| `simulate` | the engine in virtual time on a modelled device |
| `calibration` | measurements of a real machine for the simulator |
| `plan` | rooflines of devices, and the cheapest fleet for latency targets |
| `sweep` | values of one setting, measured; where the plateau begins |
| `tune` | a search of settings that is judged on a workload |
| `replay` | a recorded scheduler trace, replayed exactly or with other settings |
| `tour` | small scenarios of the guided tour |
| `forced_acceptance` | drafts that are accepted with a given probability |
| `plots` | plots of measured and simulated runs |
"""
