"""Batch jobs: many requests from a file, with each result written exactly once to a file.

- `run`: sends the requests and writes their results.
- `lines`: the lines of a batch in OpenAI's JSONL format.
- `job`: the order in which lines are sent.
- `results`: the output file, which survives a killed process.
"""
