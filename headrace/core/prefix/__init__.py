"""Prompts that share a prefix: where one leaves the cached prefix and why, and which sessions keep theirs.

- `departure`: a bounded memory of recent prompts of each tenant, the longest match in it, why a prompt left the cached
  prefix, and how many tokens were computed again.
- `sessions`: the prompts of sessions, which of their blocks a newer prompt replaces, and a limit for each tenant.
"""
