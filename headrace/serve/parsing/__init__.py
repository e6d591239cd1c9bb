"""Reads what a model writes: its reasoning, its tool calls, and the rest, which is content."""
