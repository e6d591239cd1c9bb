"""The response bodies of embeddings, reranking and scores."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.service.embedding_models import Values, as_base64, as_json
from headrace.service.embedding_worker import EmbeddingJob


def embeddings(job: EmbeddingJob, vectors: Values, encoding: str, cost: Mapping[str, Any]) -> bytes:
    """The body of ``/v1/embeddings``; call it on a worker thread. It yields to other threads after each vector."""
    items = []
    for index, vector in enumerate(vectors):
        shown = f'"{as_base64(vector)}"' if encoding == "base64" else as_json(vector)
        items.append(f'{{"object": "embedding", "index": {index}, "embedding": {shown}}}')
    head = {
        "id": job.id,
        "object": "list",
        "created": int(time.time()),
        "model": job.model.name,
        "usage": usage(job, cost),
    }
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(items)}]}}'.encode()


def ranking(
    job: EmbeddingJob,
    scores: Sequence[float],
    documents: Sequence[str] | None,
    top_n: int,
    cost: Mapping[str, Any],
) -> bytes:
    """The body of ``/v1/rerank``: the best documents first, with their texts if ``documents`` are given."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
    results = []
    for index in best:
        shown = {} if documents is None else {"document": {"text": documents[index]}}
        results.append({"index": index, **shown, "relevance_score": scores[index]})
    return _body({"id": job.id, "model": job.model.name, "usage": usage(job, cost), "results": results})


def scored(job: EmbeddingJob, scores: Sequence[float], cost: Mapping[str, Any]) -> bytes:
    """The body of ``/v1/score``: a score for each pair, in order."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    created = int(time.time())
    head = {"id": job.id, "object": "list", "created": created, "model": job.model.name}
    return _body(head | {"data": data, "usage": usage(job, cost)})


def usage(job: EmbeddingJob, cost: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a call, and its ``cost`` if it was requested."""
    return {"prompt_tokens": job.tokens, "total_tokens": job.tokens, **cost}


def _body(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()
