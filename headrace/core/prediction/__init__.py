"""Predictions: how long steps and answers take.

- `step_cost`: the cost of a step in tokens, before anything has been measured.
- `step_times`: the seconds of a step, fitted while running. `step_residuals`: what the fit leaves, by tokens.
- `step_curve`: what steps took, by tokens, whatever the fit says; prompts are divided by it.
- `draft_stairs`: the seconds of a step by its drafted positions, as a table.
- `output_lengths`: quantiles of answer lengths.
- `start_times`: when waiting requests start and end.
- `latest_start`: the latest start at which a request still meets its latency target.
- `memory_peak`: the most blocks that running sequences will hold together.
"""
