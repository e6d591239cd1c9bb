"""``/v1/responses``: OpenAI's Responses API, served through the chat body.

- `wire`: the body of a request, its items and tools, and what is not supported.
- `items`: input items in their stored form, and as chat messages; compaction.
- `output`: output items and their events, from an answer's text; the response object.
- `conversation`: a body as a chat body, fitted into the context.
- `store`: stored responses in SQLite, and streams that can be read again.
- `writer`: writes a call as a response, whole or as events.
- `routes`: the endpoints, and how they are created from the server's options.
"""
