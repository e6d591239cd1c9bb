"""Tools in requests and responses, for every dialect of the API.

- `wire`: tools and calls in requests. `dialect`: what a chat template supports, and how its outputs are parsed.
- `message_writing`: messages with calls and reasoning in responses. `constraint`: enforces a tool choice.
"""
