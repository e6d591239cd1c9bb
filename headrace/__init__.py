"""Headrace: an LLM inference server with an OpenAI-compatible API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.request import SamplingParams
    from headrace.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch only when an engine is asked for: the command line and the core must start without it."""
    if name == "SamplingParams":
        from headrace.core.request import SamplingParams

        return SamplingParams
    if name in ("LLM", "CompletionOutput", "RequestOutput"):
        from headrace import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
