"""The semantic cache: serves a similar request's response within a calibrated error bound.

- `level`: the semantic cache as one level of the lookup.
- `search_thread`: the thread that embeds, searches and judges.
- `partitions`: the rows of all partitions in memory. `index`: nearest vectors of one partition.
- `row`, `row_store`: the data stored for an answered request, and the file with all rows.
"""
