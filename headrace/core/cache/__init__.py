"""What may be answered without computing: decisions and values, no stores and no clock.

Read in this order:

- `response`: exact matches. The key of a response, what may be cached, entries and their encoding.
- `semantic`: similar requests. Vetoes, the score, the calibrated threshold, audits.
- `partial`: answers that were interrupted, and an index of past outputs.
- `prefix`: why a prompt left the cached prefix, and which sessions keep theirs.
- `warming`: what will be requested again, and when the server is idle enough to compute it ahead.
"""
