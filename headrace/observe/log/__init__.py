"""The server's log: one format, one writer, and warnings made from events.

- `format`: log records as aligned text or as JSON, one line each.
- `writer`: writes the lines on a thread of its own, and installs itself as the only log handler of the process.
- `warnings`: a fold over events that logs overload, preemption storms, store failures and failed audits.

Code that logs uses Python's `logging` and passes structured fields as ``extra={"fields": {...}}``.
"""
