"""Predictions of step times, output lengths, start times and memory use.

- `step_cost`: the cost of a step in tokens, before anything has been measured.
- `step_times`: the seconds of a step, fitted while running. `step_residuals`: corrections of that fit by tokens.
- `step_curve`: measured seconds of steps by tokens, independent of the fit; prompts are divided by it.
- `verify_times`: the seconds of a step by its number of drafted positions, as a table.
- `output_lengths`: quantiles of output lengths.
- `start_times`: when waiting requests start and end.
- `latest_start`: the latest start at which a request still meets its latency target.
- `memory_peak`: the largest number of blocks that the running sequences will hold together.
"""
