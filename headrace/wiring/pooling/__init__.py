"""A server that has only embedding and reranking models."""
