"""Cost of requests: each step's seconds divided among the requests that used them, and priced.

- `prices`: price of the device and prices of tokens. `split`: a step's seconds divided among its rows.
- `account`: what one request or one tenant has used. `ledger`: the fold over events. `report`: the ledger as JSON.
- `focus`: the ledger as CSV in FOCUS columns. `meter`: the ledger's metrics.
- `tenant_savings`: what the caches saved each tenant.
- `usage_journal`: usage since the last read. `usage_store`: the file that accumulates it over restarts.
"""
