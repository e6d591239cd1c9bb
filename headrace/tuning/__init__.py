"""Changes settings of a running server by what it measures: the only room that does. `wiring.reload` rereads files.

- `settings`: the settings that may change, of the engine and of its requests, with types and bounds.
- `evidence`: how sure a measured difference is, at any time. `measures`: what is measured, of windows and of units.
- `spec`: the definition of an experiment, and what it can detect.
- `experiment`: one experiment, by time, request or tenant.
- `traffic`: the requests that the tuner has seen, and those to come.
- `evaluator`: runs them with other settings, in a process of its own. `scheduler_model`: what runs there.
- `search`: which change is best. `tuner`: makes it, measures it, and keeps or undoes it.
- `engine_tuning`: experiments, of which one runs, and tuner of one engine, live or in virtual time.
- `live`: the same beside a service: the clock, the engine thread and the file.
- `class_shares`: weights and floors of classes that move within bounds while latency targets are missed.
"""
