"""Embedding and reranking models from their options.

- `models`: loads them. `causal`: a decoder as an embedding model.
- `endpoints`: their worker and routes. `server`: a server that has only such models.
"""
