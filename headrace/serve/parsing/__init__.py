"""Reads what a model writes: its reasoning, its tool calls, and the rest, which is content.

- `formats`: how a family writes, as data. `catalogue`: the known formats. `detect`: picks one by the chat template.
- `machine`: reads an answer in any format. `parts`: what it reports. `message`: a whole message from the parts.
- `reader`: the ground of the readers of calls, which are `json_calls`, `named_calls`, `python_calls` and `xml_calls`.
- `scan`: where a JSON value ends. `literals`: Python's and Gemma's values as JSON. `typed`: plain text as JSON.
"""
