"""One compiler of a request."""
