"""Files and batches: runs requests from a file and writes their results to a file, each exactly once.

- `lines`: the format of a line and of its result, the check of an input file, and the order of lines.
- `store`: files and batches as values, their metadata in SQLite, and the contents of files on disk.
- `work`: runs a number of lines at a time, and writes their results; ``run-batch``, which sends them to a server.
- `runs`: runs one batch to its end. `batches`: all batches of a server.
- `line_runner`: runs the lines of a batch on the endpoints of this server.
- `estimate`: logged requests, and their compilation for ``headrace cache estimate``.
- `upload`: receives a form and its file to disk. `routes`: ``/v1/files`` and ``/v1/batches``.
"""
