"""Embeddings and scores of real servers: the official client, LangChain, an encoder alone, a decoder that does both."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch

from headrace.compute.encoder.models import read_cross_encoder, read_embedding_model, run
from tests.doubles.forks import run_forked
from tests.doubles.tiny_encoder import write_cross_encoder, write_embedding_model
from tests.server.conftest import Server, serving

TEXTS = ["a b c", "d", "e f g h i j", "a b c"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_embedding_model(root / "tiny"), write_cross_encoder(root / "cross")


@pytest.fixture(scope="module")
def both(folders: tuple[Path, Path]) -> Iterator[Server]:
    """A server that generates, and has both models."""
    tiny, cross = folders
    with serving("--embedding-model", str(tiny), "--rerank-model", str(cross)) as running:
        yield running


@pytest.fixture(scope="module")
def vectors(folders: tuple[Path, Path]) -> np.ndarray:
    """The expected vectors of `TEXTS`."""
    model = read_embedding_model("tiny", folders[0], torch.device("cpu"))
    raw = run(model.run(model.tokenizer.texts(TEXTS)))
    return raw / np.linalg.norm(raw, axis=1, keepdims=True)


@pytest.fixture
def client(both: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=both.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_official_client(client: openai.OpenAI, vectors: np.ndarray, encoding: str | None) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=TEXTS, **more)
    found = [item.embedding for item in answer.data]
    if encoding == "base64":
        found = [np.frombuffer(base64.b64decode(item), "<f4") for item in found]
    np.testing.assert_allclose(np.array(found), vectors, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3 + 1 + 6 + 3 + 2 * len(TEXTS)


def test_dimensions_and_errors_with_the_official_client(client: openai.OpenAI, vectors: np.ndarray) -> None:
    [item] = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=3).data
    expected = vectors[0, :3] / np.linalg.norm(vectors[0, :3])
    np.testing.assert_allclose(item.embedding, expected, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="at most 8"):
        client.embeddings.create(model="tiny", input="a", dimensions=9)
    with pytest.raises(openai.BadRequestError, match="reads at most 32"):
        client.embeddings.create(model="tiny", input="a " * 40)
    with pytest.raises(openai.NotFoundError, match="it has 'tiny'"):
        client.embeddings.create(model="builtin", input="a")
    assert [model.id for model in client.models.list()] == ["builtin", "tiny", "cross"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_langchain(both: Server, vectors: np.ndarray) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    embeddings = langchain_openai.OpenAIEmbeddings(
        model="tiny", base_url=both.url + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), vectors, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), vectors[1], atol=1e-5)


def test_rerank_and_score(both: Server, folders: tuple[Path, Path]) -> None:
    model = read_cross_encoder("cross", folders[1], torch.device("cpu"))
    expected = run(model.run(model.tokenizer.pairs([("a b", text) for text in TEXTS])))[:, 0]
    answer = both.post("/v1/score", {"text_1": "a b", "text_2": TEXTS}).json()
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=1e-5)
    ranked = both.post("/v2/rerank", {"query": "a b", "documents": TEXTS}).json()["results"]
    assert [item["relevance_score"] for item in ranked] == pytest.approx(
        sorted(expected, reverse=True), abs=1e-5
    )


def test_a_stream_goes_on_while_a_large_request_is_computed_and_hanging_up_frees_it(both: Server) -> None:
    texts = [" ".join("abcdefghij") for _ in range(2048)]
    ended = threading.Event()

    def embed_until_ended() -> None:
        while not ended.is_set():
            assert both.post("/v1/embeddings", {"input": texts}).status_code == 200

    background = threading.Thread(target=embed_until_ended)
    background.start()
    try:
        both.wait_until(lambda info: both.metric("embedding_requests_open") > 0)
        body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", both.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
        assert '"finish_reason":"length"' in lines[-1]
    finally:
        ended.set()
        background.join()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(both.url + "/v1/embeddings", json={"input": texts}, timeout=httpx.Timeout(30, read=0.01))
    both.wait_until(lambda info: both.metric("embedding_requests_open") == 0)


def test_an_encoder_alone(folders: tuple[Path, Path], vectors: np.ndarray) -> None:
    with serving(str(folders[0]), "--rerank-model", str(folders[1])) as running:
        answer = running.post("/v1/embeddings", {"input": TEXTS, "model": "tiny"}).json()
        np.testing.assert_allclose([item["embedding"] for item in answer["data"]], vectors, atol=1e-5)
        assert running.post("/score", {"text_1": "a", "text_2": "b"}).json()["model"] == "cross"
        refused = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert refused.status_code == 404
        assert "only tiny" in refused.json()["error"]["message"]
        assert [each["id"] for each in running.get("/v1/models").json()["data"]] == ["tiny", "cross"]
        for path in ("/health", "/health/ready", "/metrics", "/server_info", "/openapi.json"):
            assert running.get(path).status_code == 200, path
        assert any("without effect" in line and "--kv-cache-memory-bytes" in line for line in running.lines)


def test_the_model_that_generates_also_embeds() -> None:
    with serving("--embedding-model", "builtin") as running:
        answer = running.post("/v1/embeddings", {"input": ["Once upon a time", "Hello"]}).json()
        one, other = (np.array(item["embedding"]) for item in answer["data"])
        assert np.linalg.norm(one) == pytest.approx(1, abs=1e-3)
        assert one @ other < 0.999
        assert running.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--embedding-model", "/nowhere"], "--embedding-model: model folder /nowhere does not exist"),
        (["--rerank-model", "TINY"], "--rerank-model: .*is not a cross-encoder"),
        (["--task", "embed"], "use --runner pooling"),
    ],
)
def test_models_that_cannot_be_used(folders: tuple[Path, Path], flags: list[str], message: str) -> None:
    given = [str(folders[0]) if flag == "TINY" else flag for flag in flags]
    ended = run_forked("-m", "headrace", "serve", "--port", "0", *given)
    assert ended.returncode != 0
    said = " ".join((ended.stdout + ended.stderr).split())
    assert re.search(message, said), said
