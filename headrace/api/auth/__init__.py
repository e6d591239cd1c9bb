"""Authentication and roles: which tenant sends a request, and which routes it may use."""
