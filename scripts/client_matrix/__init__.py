"""Client libraries against the server: one program per library, and a table of what passed.

- `__main__`: installs the libraries, starts the servers, runs the programs and prints the table.
- `python/`, `node/`: the programs. `cases` in each has what they share.
"""
