"""The pages in the browser: the dashboard's files and its live stream. Sources of the files are in ``tools/web``.

- `routes`: the endpoints, and what each role sees.
- `broadcast`: makes each snapshot once for all who listen, and only while one does.
- `assets`: the built files with their headers.
"""
