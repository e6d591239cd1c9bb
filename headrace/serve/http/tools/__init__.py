"""Tools on the wire, for every dialect of the API.

- `wire`: tools and calls in requests. `dialect`: what a chat template can do, and how answers to it are read.
- `message_writing`: messages with calls and reasoning in responses. `constraint`: enforces a tool choice.
"""
