"""Anthropic's Messages API, served through the chat body.

- `wire`: the bodies of requests, and what is not supported; errors and the model card.
- `conversation`: a body as a chat body.
- `routes`: the endpoints, and a response as content blocks, whole or as events.
"""
