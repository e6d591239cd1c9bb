"""Runs the HTTP application: listening, connections, start and drain.

- `listening`: checks of addresses, TLS files and exposure before the start.
- `run`: runs the server, reloads and drains it. `lifespan`: starts and stops the application without a server.
- `connection`: one connection, with limits on request heads.
- `garbage_collection`: runs Python's garbage collection while no request waits.
"""
