"""Streams of responses that can be read again, also while they grow.

- `log`: the events of one response. `following`: an HTTP response that sends them.
"""
