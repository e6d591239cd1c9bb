"""Headrace: an LLM inference server that can be read in a day."""

from __future__ import annotations

__version__ = "0.1.0"
