"""Cost of requests: each step's seconds divided among the requests that used them, and priced.

- `prices`: price of the device and prices of tokens. `ledger`: the fold over events, and its metrics.
- `report`: the ledger as JSON, and as CSV in FOCUS columns.
- `usage`: what the caches saved each tenant; usage since the last read, and the file that accumulates it over restarts.
"""
