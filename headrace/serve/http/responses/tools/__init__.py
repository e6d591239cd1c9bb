"""The tools of a request for a response.

- `wire`: functions, namespaces of functions, hosted tools, and the choice among them.
- `names`: a function of a namespace has one name for the model, and two for the client.
"""
