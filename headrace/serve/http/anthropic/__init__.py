"""Anthropic's Messages API, on the same road as chat completions.

- `routes`: the routes. `wire`: request bodies. `refusals`: what clients know and this server refuses by name.
- `conversation`: a request as the chat request that it means. `content`: an answer as content blocks.
- `writer`: responses and events. `errors`: errors in Anthropic's format. `models`: the list of models.
"""
