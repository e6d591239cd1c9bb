"""Requests to measure with: frozen values, drawn from a seed, the same for every target."""

from headrace.lab.workload.work import Message, Prompt, Work

__all__ = ["Message", "Prompt", "Work"]
