"""Prompts that share a prefix: where one leaves the cached prefix and why, and which sessions keep theirs.

- `prompt_memory`: a bounded memory of recent prompts of each tenant, as fingerprints, and the longest match in it.
- `departure`: why a prompt left the cached prefix, and how many tokens were computed again.
- `sessions`: the prompts of sessions, which of their blocks a newer prompt replaces, and a limit for each tenant.
"""
