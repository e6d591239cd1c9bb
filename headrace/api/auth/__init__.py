"""Authentication and roles: which tenant sends a request, and which routes it may use.

- `roles`: the roles, and one table that says which role each route needs.
- `api_keys`: reads API keys from options and files, and finds the identity of a key.
- `access`: checks one request against the table and the keys.
- `origin`: checks the host that a request names, and the web page that sent it.
- `key_file`: reads the key file again when it changes.
"""
