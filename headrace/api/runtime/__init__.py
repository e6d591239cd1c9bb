"""Runs the HTTP application: listening, connections, start and drain.

- `listening`: checks of addresses and exposure before the start, and the Unix socket. `tls`: certificate and key.
- `open_files`: how many connections the limit of open files leaves room for.
- `run`: runs the server, reloads and drains it. `lifespan`: starts and stops the application without a server.
- `connection`: one connection, with limits on request heads.
- `garbage_collection`: runs Python's garbage collection while no request waits.
"""
