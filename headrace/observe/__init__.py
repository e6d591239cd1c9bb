"""Observes the server: metrics, explanations of requests, logs, traces and recordings, as folds over events.

- `metrics`, `engine_series`: the metrics that dashboards read. `goodput`: latency targets, classes, fairness.
- `cache_metrics`, `tier_metrics`: what the caches saved and what KV offloading moved. `http_requests`: HTTP responses.
- `metrics_page`, `series`: the page of ``/metrics`` and its numbers. `vllm_names`: names of vLLM's dashboards.
- `requests`, `reasons`: the explanation of one request. `usage`: usage of each tenant.
- `steps`: the last steps and the timelines of requests, for pages and trace viewers.
- `prefixes`: where prompts missed the prefix cache, and why.
- `kv_events`: what the prefix cache holds, for cache-aware routers.
- `cost`: the cost of requests. `resources`: threads, device, energy, work and traffic as metrics.
- `fairness`, `waste`: Jain's fairness index and unused KV memory, also used by `headrace.lab`.
- `drafts`: speculative decoding.
- `sketch`: a quantile sketch.
- `dashboard`: snapshots of all of these for the dashboard.
- `log`: log format and writer. `tracing`: OpenTelemetry spans. `recording`: scheduler traces that can be replayed.
"""
