"""Prompts before they are submitted: per-request markers that break shared prefixes, sections, and sessions.

- `markers`: the table of known per-request markers in system messages.
- `normalize`: removes or moves them before messages become a prompt.
- `outline`: which message or section a token of a prompt belongs to.
- `policy`: normalization, explanation and sessions of prompts.
- `entry`: describes a conversation's prompt for its explanation.
- `routes`: the endpoint that releases a session.
"""
