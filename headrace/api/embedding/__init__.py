"""Embeddings, reranking and scores: the endpoints of OpenAI, vLLM, Jina and Cohere."""
