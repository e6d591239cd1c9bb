"""Files and batches: runs requests from a file and writes their results to a file, each exactly once.

- `lines`: the format of a line and of its result. `job`: the order of lines. `work`: runs a number of lines at a time.
- `results`: output files. `run`: ``run-batch``, through an HTTP client.
- `records`: files and batches as values. `store`: their metadata in SQLite. `contents`: contents of files on disk.
- `validation`: checks an input file. `runs`: runs one batch to its end. `batches`: all batches of a server.
- `multipart`: reads a form as it arrives. `upload`: receives a file to disk.
- `wire`: bodies, objects and errors. `files`: ``/v1/files``. `routes`: ``/v1/batches``.
- `line_runner`: runs the lines of a batch on the endpoints of this server. `line_endpoints`: those endpoints.
- `opening`: creates all of it from the server's options.
"""
