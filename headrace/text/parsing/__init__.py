"""Parses the output of a model: reasoning, tool calls, and the rest, which is content.

- `formats`: a model family's format, as data. `catalogue`: the known formats. `detect`: selects one by chat template.
- `machine`: parses an output in any format. `parts`: what it returns. `message`: a message from the parts.
- `reader`: base class of the readers of calls, which are `json_calls`, `named_calls`, `python_calls` and `xml_calls`.
- `scan`: where a JSON value ends. `literals`: Python's and Gemma's values as JSON. `typed`: plain text as JSON.
"""
