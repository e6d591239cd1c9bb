"""Embeddings and scores: converts inputs to rows of tokens, which the engine thread computes between its steps.

- `models`: the interface of embedding models and cross-encoders.
- `inputs`: texts and tokens of a call as rows, with their limits checked.
- `job`: one call. `worker`: computes inputs in batches and slices between steps.
- `vectors`: dimensions, normalization, similarity.
"""
