"""The waiting queue: classes by share, tenants of a class by share, requests of a tenant by their order.

- `order`: queue order policies (`rank`, lowest first).
- `tenant_queue`: the waiting requests of one tenant in one class.
- `late_requests`: which requests are deferred when not all can meet their latency target.
- `fair_queue`: the queue of all waiting requests.
- `job_order`: the order of a batch that is known beforehand, so that each prefix is computed once.
"""
