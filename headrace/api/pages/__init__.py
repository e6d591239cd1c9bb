"""The pages in the browser: the dashboard's files and its live stream. Sources of the files are in ``tools/web``.

- `routes`: the endpoints, and what each role sees.
- `broadcast`: makes each snapshot once for all listeners, and only while there are any.
- `assets`: the built files with their headers.
"""
