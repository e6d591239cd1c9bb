"""The HTTP server: application, routes, errors and streams.

- `auth`: API keys, roles and origins.
- `routing`: one row a route, above its handler.
- `app`: the ASGI applications. `edge`: roles, request ids and error handling around all routes.
- `exchange`: one HTTP request and its response, for the access log, metrics and traces.
- `runtime`: listening, connections, start and drain.
- `wire`, `body`, `content_encoding`: decode and parse request bodies strictly. `errors`: one format for all errors.
- `structured`: fields that ask for structured output. `constraints`: their constraints.
- `model`: the served model. `template_lanes`: threads for chat templates that need a process.
- `replies`: JSON documents and server-sent events.
- `openapi`: ``/openapi.json`` and ``/docs``. `rate_limit_headers`: OpenAI's rate limit headers.
- `paging`: pages of listings.
- `generation`: the common parts of all endpoints that generate. `openai`: OpenAI's endpoints.
- `responses`: OpenAI's Responses API.
- `anthropic`: Anthropic's Messages API.
- `embedding`: embeddings, reranking and scores.
- `tools`: tools and tool calls, in any dialect.
- `batch`: files and batches.
- `pages`: the dashboard and its live stream.
- `prompts`: per-request markers, explanations of prefix cache misses, sessions.
- `cache`: endpoints of the response caches. `operations`: health, metrics, usage, abort, pause, access log.
"""
