"""Anthropic's Messages API, served through the chat body.

- `wire`: the bodies of requests, and what is not supported. `conversation`: a body as a chat body.
- `writer`: a response as content blocks, whole or as events. `formats`: errors and the model card.
- `routes`: the endpoints.
"""
