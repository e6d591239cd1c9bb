"""What ``--metrics-prefix vllm`` adds, so that dashboards and autoscalers made for vLLM work unchanged.

Names and labels of the current release are the same as ours. Older dashboards use names that vLLM has since changed.
"""

from __future__ import annotations

PREFIX = "vllm"

LABELS = {"engine": "0"}
"""Labels that vLLM puts on every series beside ``model_name``."""

ALIASES = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "estimated_flops_per_gpu": "estimated_flops",
}
"""Names of vLLM, former ones among them, and ours."""


def labels(prefix: str, model: str) -> dict[str, str]:
    """The labels of every series of a page."""
    return {"model_name": model} | (LABELS if prefix == PREFIX else {})


def aliases(prefix: str) -> dict[str, str]:
    """The aliases of a page."""
    return ALIASES if prefix == PREFIX else {}
