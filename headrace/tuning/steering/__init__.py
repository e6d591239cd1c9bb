"""Changes of an engine's settings while it serves.

- `settings`: the settings that may change, of the engine and of its requests, with types and bounds.
- `engine`: the experiments and the tuner of one engine, in one order.
"""
