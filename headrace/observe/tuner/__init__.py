"""Bounded tuning while serving: one small change of one setting at a time, rehearsed before, measured after.

- `steps`: how far each setting may go, and in what steps.
- `history`: the requests of the last windows, and what was measured in them.
- `rehearsal`: the same requests once more through a model of the scheduler, with other settings.
- `verdict`: how a change is judged.
- `tuner`: which change is made, and which is undone.
"""
