"""Authentication: API keys in, tenants out.

- `api_keys`: reads and checks API keys.
"""
