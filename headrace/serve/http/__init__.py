"""The HTTP server: application, routes, errors and streams.

- `app`: the ASGI applications. `edge`: roles, request ids and error handling around all routes.
- `exchange`: one HTTP request and its response, for the access log, metrics and traces.
- `listening`: checks of addresses, TLS files and exposure before the start.
- `connection`: one connection, with limits on request heads. `run`: runs the server, reloads and drains it.
- `wire`, `body`: parse request bodies strictly. `errors`: one format for all errors.
- `structured`: fields that ask for structured output.
- `model`: the served model. `replies`: JSON documents and server-sent events.
- `openapi`: ``/openapi.json`` and ``/docs``. `rate_limit_headers`: OpenAI's rate limit headers.
- `lifespan`: starts and stops the application without a server.
- `garbage_collection`: runs Python's garbage collection while no request waits.
- `generation`: what all generating endpoints share. `openai`: OpenAI's endpoints. `anthropic`: Anthropic's.
- `tools`: tools and tool calls, in any dialect.
- `cache`: endpoints of the response caches. `operations`: health, metrics, usage, abort, pause, access log.
"""
