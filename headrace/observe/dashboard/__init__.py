"""Snapshots for the dashboard, read from the server's folds while a page is open.

- `folds`: all folds of a server.
- `reading`: all counters at one time; differences of two readings give rates.
- `bottleneck`: the current bottleneck, as a sentence.
- `latency`: percentiles of the requests that ended in the last minute.
- `request_rows`: the list of requests.
- `overview`: the whole server's overview. `tenant_overview`: that of one tenant.
- `tenants`: share, quota and cost of each tenant.
- `dashboard`: the parts of a snapshot.
"""
