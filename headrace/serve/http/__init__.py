"""The HTTP server: application, routes, errors and streams.

- `app`: the ASGI application. `edge`: request ids, keys and the last error handler around all routes.
- `run`: runs the server, drains it at shutdown. `lifespan`: starts and stops the application without a server.
- `wire`, `body`: strict request bodies. `errors`: one shape for all errors.
- `model`: the served model. `replies`: JSON and server-sent events.
- `openapi`: ``/openapi.json`` and ``/docs``. `rate_limit_headers`: OpenAI's rate limit headers.
- `garbage_collection`: runs Python's garbage collection while no request waits.
- `generation`: what all generating endpoints share. `openai`: OpenAI's endpoints.
- `tools`: tools and tool calls, in any dialect.
- `batch`: files and batches. `cache`: endpoints of the response caches. `operations`: health, metrics, usage, abort.
"""
