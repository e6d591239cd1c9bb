"""Replay of a recorded scheduler trace: the same core with a runner that returns the recorded tokens. In reading order:

- `trace`: the file as values.
- `runner`, `drafter`, `exact`: replay step by step, compared with the recording.
- `timed`, `rerun`, `tally`: replay in virtual time with other settings, and its figures.
- `request_states`, `show`: states of requests, and tables.
"""
