"""Embeddings, reranking and scores: the endpoints of OpenAI, vLLM, Jina and Cohere.

- `routes`: the routes. `wire`: request bodies. `documents`: response bodies.
- `calls`: bodies as calls to their models. `exchange`: one call from its admission to its result.
- `cards`: the models as ``/v1/models`` lists them. `instead`: answers of a server without a model that generates.
"""
