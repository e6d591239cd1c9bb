"""``/v1/responses``: OpenAI's Responses API, served through the chat API.

- `wire`: the body of a request. `input_wire`: its input items. `refusals`: known fields that are not supported.
- `items`: input items in their stored form, and as chat messages. `conversation`: a body as a chat body.
- `output`: output items and their events, from an answer's text. `resource`: the response object.
- `writer`: writes a call as a response, whole or as events.
- `store`: stored responses in SQLite. `kept_answer`: delays the end of a response until it is stored.
- `background`: responses that no client waits for.
- `context`: conversations that are too long. `tools`: functions, namespaces, hosted tools.
- `streams`: streams that can be read again.
- `routes`: the endpoints. `opening`: creates all of it from the server's options.
"""
