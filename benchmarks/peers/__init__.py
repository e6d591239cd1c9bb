"""A race against other engines: the same weights, the same requests, the same client and cores."""
