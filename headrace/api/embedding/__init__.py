"""Embeddings, reranking and scores: the endpoints of OpenAI, vLLM, Jina and Cohere.

- `routes`: the routes. `wire`: request bodies. `documents`: response bodies.
- `calls`: converts bodies to calls of their models. `exchange`: one call from its admission to its result.
- `cards`: the models in ``/v1/models``. `instead`: errors of a server without a generative model.
"""
