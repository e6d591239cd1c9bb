"""Anthropic's Messages API, served through the chat API.

- `routes`: the routes. `wire`: request bodies. `refusals`: fields and blocks that are not supported.
- `conversation`: converts a request to a chat request. `content`: a response as content blocks.
- `writer`: responses and events. `errors`: errors in Anthropic's format. `models`: the list of models.
"""
