"""What the dashboard shows: snapshots of the folds that a server has anyway, made while a page is open.

- `folds`: all folds of a server.
- `reading`: all counters at one time; the differences of two readings are rates.
- `bottleneck`: what bounds the server now, in a sentence.
- `latency`: percentiles of the requests that ended in the last minute.
- `request_rows`: the list of requests.
- `overview`: the whole server's overview. `tenant_overview`: that of one tenant.
- `tenants`: share, quota and cost of each tenant.
- `dashboard`: the parts of a snapshot.
"""
