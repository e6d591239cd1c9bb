"""Parses the output of a model: reasoning, tool calls, and the rest, which is content.

- `formats`: a model family's format, as data. `catalogue`: the known formats, and which one a chat template shows.
- `machine`: parses an output in any format, and makes a message from the parts.
- `reader`: what a parser returns, where a JSON value ends, and the base class of the readers of calls:
- `calls`: JSON objects, one element per argument, and plain text as JSON. `python_calls`: also Gemma's values and named
  calls.
"""
