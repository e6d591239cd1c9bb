"""Bounded tuning while serving: one small change of one setting at a time, rehearsed before, measured after.

- `steps`: how far each setting may go, and in what steps.
- `history`: the requests of the last windows, and what was measured in them.
- `forecast`: what is to come: the requests of the last minutes once more, at loads that may come.
- `rehearsal`: requests through a model of the scheduler, with other settings.
- `chooser`: which change is best for what is to come.
- `verdict`: how a change is judged.
- `tuner`: which change is made, and which is undone.
"""
