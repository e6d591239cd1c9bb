"""From waiting requests to step plans.

- `scheduler`: plans a step and commits its output.
- `step_builder`: a step plan while it is being made.
- `other_work`: how long other work may take between two steps.
- `drafted_rows`: the drafts of a step's rows, and what was accepted of them.
- `admitter`: admits waiting requests into a step.
- `admission`: when waiting requests may join the batch, continuously or as a static batch; the one with the longest
  cached prefix.
- `holds`: what a waiting request waits for outside the engine.
- `running_set`: running sequences, their slots, and preemption.
- `victims`: victim selection for preemption.
- `start_estimate`: position in the queue, predicted start and end of a waiting request.
- `routing`: which replica of a fleet serves a request.
"""
