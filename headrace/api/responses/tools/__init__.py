"""The tools of a request of the Responses API.

- `wire`: functions, namespaces of functions, hosted tools, and the choice among them.
- `names`: maps a namespace and a name, which clients use, to the one name that the model sees.
"""
