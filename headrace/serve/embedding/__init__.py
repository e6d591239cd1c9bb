"""Embeddings and scores: inputs become rows of tokens, and the engine thread computes them between its steps.

- `models`: what is needed of an embedding model and of a cross-encoder.
- `inputs`: texts and tokens of a call as rows, with their limits checked.
- `job`: one call. `worker`: its inputs, in batches and slices between steps.
- `vectors`: dimensions, normalization, similarity.
"""
