"""Records a scheduler trace: all inputs of an engine and the events of each step, for replay without a model.

- `moments`: the entries of a trace. `engine`, `drafter`: an engine that records them. `tape`: writes them to a file.
- `wire`: entries as JSON lines. `fingerprints`: tokens as keyed hashes, so that a trace contains no text.
"""
