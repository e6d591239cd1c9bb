"""Predictions of step times, output lengths, start times and memory use.

- `step_times`: the seconds of a step, fitted while running, corrected by tables of measured steps.
- `step_curve`: measured seconds of steps by tokens, independent of the fit; prompts are divided by it.
- `output_lengths`: quantiles of output lengths.
- `latest_start`: the latest start at which a request still meets its latency target.
- `memory_peak`: the largest number of blocks that the running sequences will hold together.
"""
