"""Names and labels of ``--metrics-prefix vllm``, so that dashboards and autoscalers made for vLLM work unchanged.

Metric names are those of the current vLLM release; aliases are names that older dashboards use.
"""

from __future__ import annotations

PREFIX = "vllm"

LABELS = {"engine": "0"}
"""Labels that vLLM adds to every series, in addition to ``model_name``."""

ALIASES = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "estimated_flops_per_gpu": "estimated_flops",
}
"""Current and former names of vLLM, with ours."""


def labels(prefix: str, model: str) -> dict[str, str]:
    """The labels of every series of a page."""
    return {"model_name": model} | (LABELS if prefix == PREFIX else {})


def aliases(prefix: str) -> dict[str, str]:
    """The aliases of a page."""
    return ALIASES if prefix == PREFIX else {}
