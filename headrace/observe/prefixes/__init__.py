"""Where prompts of requests missed the prefix cache, and why.

- `book`: a fold over events that explains each request, and the counter of recomputed tokens.
"""
