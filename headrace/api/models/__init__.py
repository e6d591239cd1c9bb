"""The front of a server of several models: sends each request to the process of its model, and joins their pages.

- `relay`: HTTP over the Unix socket of a process. `routes`: which model, and where to; pages of all.
"""
