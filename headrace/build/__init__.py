"""The composition root: the one place that knows every class and sees every option.

`engine` composes the core from its options without torch, so that the simulator runs the very same engine; `model`
loads weights and puts a runner under it; `server` puts HTTP in front. Each class is handed just what it needs.
"""
