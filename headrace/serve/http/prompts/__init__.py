"""Prompts that share a prefix: what changes in each request, what is done about it, and where messages begin.

- `markers`: the table of known per-request markers in system messages.
- `normalize`: removes or moves them before messages become a prompt.
- `outline`: which message or section a token of a prompt belongs to.
- `policy`: what a server does with prompts before it submits them.
- `entry`: describes a conversation's prompt for its explanation.
- `routes`: the endpoint that releases a session.
"""
