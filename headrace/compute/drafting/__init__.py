"""Draft models for speculative decoding: a model or head that proposes tokens for the target to verify.

- `draft_model`: the proposer: rows of a call, draft lengths, and failures.
- `followed`: the requests that a draft model follows, and their pages of keys and values.
- `forward`: packed forward passes of the draft model, and the likeliest token of each row.
- `loading`: loads the draft model's checkpoint, and its sizes for the memory plan.
- `head`: an EAGLE-3 head, which reads hidden states of the target. `head_loading`: loads it by the published layout.
- `head_drafts`: the proposer on a head, to which the runner hands the states of each step.
- `guarded`: the common base of both proposers.
"""
