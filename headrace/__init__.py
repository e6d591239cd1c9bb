"""Headrace: an LLM inference server with an OpenAI-compatible API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.request import SamplingParams
    from headrace.llm import (
        LLM,
        AsyncLLM,
        CompletionDelta,
        CompletionOutput,
        EmbeddingOutput,
        LoRARequest,
        RequestOutput,
        ScoreOutput,
    )
    from headrace.wiring.server import build_app

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionDelta",
    "CompletionOutput",
    "EmbeddingOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "__version__",
    "build_app",
]

_MODULES = dict.fromkeys(__all__, "headrace.llm") | {
    "SamplingParams": "headrace.core.request",
    "build_app": "headrace.wiring.server",
}


def __getattr__(name: str) -> Any:
    """Import torch only when an engine is asked for: the command line and the core must start without it."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
