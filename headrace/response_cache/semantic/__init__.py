"""The semantic cache: serves a similar request's response within a calibrated error bound.

- `level`: the semantic cache as one level of the lookup.
- `search_thread`: the thread that embeds, searches and judges.
- `partitions`: the rows of all partitions in memory, and their nearest vectors.
- `rows`: the data stored for an answered request, the file with all rows, and rows that servers share through a store.
- `pair_book`: pairs to label, the file of their labels, and the rules that labels certify for tenants.
- `calibrate`: fits the score on labelled requests from a file and counts errors of simulated decisions, for
  ``headrace cache calibrate``.
- `estimate`: the semantic cache on logged requests, which have no responses.
- `opening`: opens the semantic cache from its options.

Its decisions are in `response_cache.rules`.
"""
