"""Where the prompts of requests left the prefix cache, and why.

- `book`: a fold over events that explains each request, and the counter of tokens computed again.
"""
