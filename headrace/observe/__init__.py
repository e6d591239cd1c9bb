"""Observes the server: metrics, explanations of requests, logs, traces and recordings, as folds over events.

- `metrics`, `engine_series`: the metrics that dashboards read, also HTTP responses and LoRA adapters of open requests.
- `goodput`: latency targets, classes, fairness.
- `cache_metrics`: what the caches saved; encoded images, and the time of lookups in the prefix cache.
- `metrics_page`: the page of ``/metrics``, its numbers, and the names of vLLM's dashboards.
- `resources`: threads, device and energy. `work`: work of the model.
- `requests`, `reasons`: the explanation of one request. `usage`: usage of each tenant.
- `steps`: the last steps and the timelines of requests, for pages and trace viewers.
- `prefixes`: where prompts missed the prefix cache, and why.
- `kv_events`: what the prefix cache holds, for cache-aware routers.
- `cost`: the cost of requests, and what the caches saved each tenant.
- `sketch`: a quantile sketch.
- `readings`: all folds of a server, and readings of their counters. `dashboard`: snapshots of them for the dashboard.
- `log`: log format and writer, and warnings. `tracing`, `span_exporter`: OpenTelemetry spans.
- `recording`: an engine that records its inputs and events, for replay without a model. `trace_file`: the file of them.
"""
