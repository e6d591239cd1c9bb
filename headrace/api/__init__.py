"""The HTTP server: application, routes, errors and streams.

- `auth`: API keys, roles and origins.
- `routing`: one row a route, above its handler.
- `app`: the ASGI applications. Roles, request ids and error handling are around all routes.
- `exchange`: one HTTP request and its response, for the access log, metrics and traces; the client of its call.
- `runtime`: listening, connections, start and drain.
- `body`: reads bodies strictly: bytes, JSON, fields. `wire`: their types, and queries of listings.
- `errors`: one format for all errors.
- `fetching`: images that requests name by URL.
- `compile`: from a typed body to requests of the engine, in four stages.
- `replies`: JSON documents and server-sent events. `logprobs`: log-probabilities in responses.
- `serving`: what the endpoints that generate share.
- `openapi`: ``/openapi.json`` and ``/docs``. `rate_limit_headers`: OpenAI's rate limit headers.
- `openai`: OpenAI's endpoints.
- `responses`: OpenAI's Responses API.
- `anthropic`: Anthropic's Messages API.
- `embedding`: embeddings, reranking and scores.
- `batch`: files and batches.
- `models`: the front of a server of several models. `fronts`: several front ends before one server.
- `pages`: the dashboard and its live stream.
- `cache`: endpoints of the response caches. `operations`: health, metrics, usage, abort, pause, access log.
"""
