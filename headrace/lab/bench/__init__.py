"""The benchmark: one client and one set of definitions for all targets. Files in reading order:

- `record`: what is measured of one request; `spec`: how a target is named.
- `connection`, `client`, `load`: HTTP, the OpenAI client, and offering a load to a server.
- `engine`, `padded`: an engine in this process, and padded batches with transformers, as targets.
- `measure`: running targets, alone or in alternating rounds.
- `stats`, `figures`: definitions of figures, and the figures by which runs are compared.
- `report`, `plot`, `machine`: tables, JSON, plots, and the facts of the machine.
- `latency`, `roofline`: the time of a step, part by part, and the bounds of the machine.
"""
