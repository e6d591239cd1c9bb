"""OpenAI's endpoints for files and batches.

- `multipart`: reads a form as it arrives. `upload`: receives a file to disk.
- `wire`: bodies, objects and errors. `files`: ``/v1/files``. `batches`: ``/v1/batches``.
- `line_runner`: runs the lines of a batch on the endpoints of this server. `line_endpoints`: those endpoints.
- `opening`: creates all of it from the server's options.
"""
