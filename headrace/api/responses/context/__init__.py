"""Conversations that are longer than they should be.

- `compaction`: a conversation as one item with a summary that the served model wrote.
- `fitting`: applies ``context_management`` and ``truncation`` to a conversation.
"""
