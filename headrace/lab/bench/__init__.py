"""The benchmark: one client and one set of definitions for all targets. Files in reading order:

- `stats`: what is measured of one request, definitions of figures, and those by which runs are compared.
- `client`: the OpenAI client, its connections, and the load that it offers to a server.
- `engine`: an engine in this process as a target. `static_batching`: padded batches with transformers as a target, and
  the maximum gain of continuous batching over static batching.
- `report`: running targets, alone or in alternating rounds; tables, JSON, rows of requests as CSV or Parquet, and the
  facts of the machine.
- `latency`: the time of a step, part by part, and the bounds of the machine.
"""
