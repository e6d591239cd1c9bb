"""Conversations that are longer than they should be.

- `compaction`: a conversation as one item, which the served model sums it up in.
- `fitting`: what of a conversation a response sees, with ``context_management`` and ``truncation``.
"""
