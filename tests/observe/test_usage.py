from __future__ import annotations

import json

import pytest

from headrace.core.embedding import Embedded
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    Finished,
    Layer,
    Spared,
    TurnedAway,
)
from headrace.core.request import FinishReason, RejectReason
from headrace.observe import usage
from headrace.observe.usage import UsageBook


def test_embeddings_have_their_own_counts() -> None:
    book = UsageBook()
    book.fold(Embedded("a", "acme", "embed", 3, 20, 20, 0.1, FinishReason.STOP), 0.0)
    book.fold(Embedded("b", "acme", "rerank", 2, 20, 5, 0.1, FinishReason.CANCELLED), 0.0)
    rejected = RejectReason.TENANT_LIMIT
    book.fold(Embedded("c", "acme", "score", 9, 90, 0, 0.0, FinishReason.REJECTED, rejected), 0.0)
    reported = book.account("acme")
    assert (reported["embedding_requests"], reported["embedding_inputs"], reported["embedding_tokens"]) == (
        2,
        5,
        25,
    )
    assert reported["refused"] == {"tenant_limit": 1}
    assert reported["requests"] == reported["computed_tokens"] == 0


def test_an_account_adds_up_what_was_worked_on() -> None:
    book = UsageBook()
    for name in ("a", "b"):
        book.fold(Arrived(name, 40, "acme", 0), 0.0)
        book.fold(Admitted(name, AdmitReason.NEW, 16, 40), 0.0)
        book.fold(Chunked(name, 16, 24, ChunkReason.WHOLE), 0.0)
        book.fold(Emitted(name, (1,)), 0.0)
        book.fold(Admitted(name, AdmitReason.RESUMED, 32, 41), 0.0)
        book.fold(Chunked(name, 32, 9, ChunkReason.WHOLE), 0.0)
    book.fold(Finished("a", FinishReason.STOP, 40, 1, 16), 1.0)
    book.fold(TurnedAway("c", "acme", "default", RejectReason.QUEUE_FULL), 1.0)
    book.fold(Finished("c", FinishReason.REJECTED, 5, 0, 0), 1.0)
    book.fold(Spared("d", "acme", Layer.EXACT, 40, 5, 1.0), 1.0)
    reported = book.account("acme")
    assert json.loads(json.dumps(reported)) == {
        "tenant": "acme",
        "requests": 2,
        "open_requests": 1,
        "finished": {"stop": 1},
        "refused": {"queue_full": 1},
        "prompt_tokens": 80,
        "computed_tokens": 66,
        "cached_tokens": 32,
        "generated_tokens": 2,
        "embedding_requests": 0,
        "embedding_inputs": 0,
        "embedding_tokens": 0,
        "spared_requests": 1,
        "spared_tokens": 45,
    }
    assert book.tenants() == ["acme"]


def test_an_unknown_tenant_has_no_usage() -> None:
    assert UsageBook().account("nobody")["requests"] == 0


def test_invented_tenants_share_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_TENANTS", 2)
    book = UsageBook()
    for number in range(5):
        book.fold(Arrived(str(number), 1, f"tenant-{number}", 0), 0.0)
    assert book.tenants() == ["other", "tenant-0", "tenant-1"]
    assert book.account("other")["requests"] == 3
