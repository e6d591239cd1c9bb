"""Embeddings, reranking and scores over HTTP: answers, limits, errors of each field, disconnects."""

from __future__ import annotations

import asyncio
import base64
import struct

import pytest
from starlette.testclient import TestClient

from headrace.api.compile.policies import Rules
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.service.embedding_models import PoolingModels
from tests.api.conftest import House, build_house, disconnected
from tests.doubles.pooling_models import LETTERS, LetterModel, LetterPairs

SOON = 60.0


@pytest.fixture
def model() -> LetterModel:
    return LetterModel()


@pytest.fixture
def options(model: LetterModel) -> dict:
    return {"embedding_models": PoolingModels(model, LetterPairs("pairs"))}


def post(house: House, path: str, body: dict, **more):
    return house.client.post(path, json=body, **more)


def error(answer) -> dict:
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("given", "hot"),
    [("ab", [[0, 1]]), (["a", "bb"], [[0], [1]]), ([1, 2], [[1, 2]]), ([[1], [2, 2]], [[1], [2]])],
)
def test_every_form_of_input(house: House, given: object, hot: list[list[int]]) -> None:
    answer = post(house, "/v1/embeddings", {"input": given, "model": "letters"}).json()
    assert answer["object"] == "list"
    assert answer["model"] == "letters"
    assert [item["index"] for item in answer["data"]] == list(range(len(hot)))
    for item, letters in zip(answer["data"], hot, strict=True):
        assert item["object"] == "embedding"
        assert len(item["embedding"]) == LETTERS
        assert sum(number**2 for number in item["embedding"]) == pytest.approx(1.0)
        assert [index for index, number in enumerate(item["embedding"]) if number] == letters


def test_usage_counts_all_tokens(house: House) -> None:
    answer = post(house, "/v1/embeddings", {"input": ["ab", "c"], "user": "acme"}).json()
    assert answer["usage"] == {"prompt_tokens": 4 + 3, "total_tokens": 4 + 3}
    [account] = house.client.get("/v1/usage?tenant=acme").json()["data"]
    assert account["embedding_requests"] == 1
    assert account["embedding_inputs"] == 2
    assert account["embedding_tokens"] == 7


def test_base64_dimensions_and_normalization(house: House) -> None:
    body = {"input": "aaabbbbc", "dimensions": 2, "encoding_format": "base64"}
    [item] = post(house, "/v1/embeddings", body).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == pytest.approx((0.6, 0.8))
    [item] = post(house, "/v1/embeddings", {"input": "aab", "normalize": False}).json()["data"]
    assert item["embedding"][:3] == [2, 1, 0]


def test_prompt_and_truncation(house: House) -> None:
    body = {"input": "a", "prompt_name": "query", "normalize": False}
    [item] = post(house, "/v1/embeddings", body).json()["data"]
    assert (item["embedding"][0], item["embedding"][16]) == (1, 2)
    answer = post(house, "/v1/embeddings", {"input": "a" * 50, "truncate_prompt_tokens": -1}).json()
    assert answer["usage"]["prompt_tokens"] == 12
    answer = post(house, "/v1/embeddings", {"input": "a" * 50, "truncate_prompt_tokens": 5}).json()
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({}, "input", "missing_required_parameter", "Missing"),
        ({"input": 5}, "input", "invalid_type", "a list of lists of token ids"),
        ({"input": ["a", 1]}, "input", "invalid_type", "must be"),
        ({"input": [["a"]]}, "input", "invalid_type", "must be"),
        ({"input": [True]}, "input", "invalid_type", "must be"),
        ({"input": ""}, "input", "invalid_value", "must not be empty"),
        ({"input": []}, "input", "invalid_value", "must not be empty"),
        ({"input": ["a", ""]}, "input", "invalid_value", "must not be empty"),
        ({"input": [[]]}, "input", "invalid_value", "must not be empty"),
        ({"input": ["a"] * 2049}, "input", "invalid_value", "at most 2048 inputs, got 2049"),
        ({"input": [28]}, "input", "invalid_value", "token id 28; ids are 0 to 27"),
        ({"input": "a" * 11}, "input", "context_length_exceeded", "13 tokens; letters reads at most 12"),
        ({"input": "a", "dimensions": 27}, "dimensions", "invalid_value", "at most 26"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value", "greater than or equal to 1"),
        ({"input": "a", "dimensions": "2"}, "dimensions", "invalid_type", "valid integer"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value", "'base64'"),
        ({"input": "a", "normalize": 1}, "normalize", "invalid_type", "boolean"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "invalid_value", "document, query"),
        (
            {"input": "a", "truncate_prompt_tokens": 13},
            "truncate_prompt_tokens",
            "invalid_value",
            "-1 or 1 to 12",
        ),
        (
            {"input": "a", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            "invalid_value",
            "or equal to -1",
        ),
        ({"input": "a", "user": 1}, "user", "invalid_type", "string"),
        ({"input": "a", "messages": [{}]}, "messages", "unsupported_parameter", "not supported"),
        ({"input": "a", "colour": 1}, "colour", "unknown_parameter", "Unknown"),
        ({"input": "a", "model": "other"}, "model", "model_not_found", "it has 'letters'"),
    ],
)
def test_wrong_embedding_requests(house: House, body: dict, param: str, code: str, words: str) -> None:
    answer = post(house, "/v1/embeddings", body)
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert error(answer)["param"] == param
    assert error(answer)["code"] == code
    assert words in error(answer)["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank(house: House, path: str) -> None:
    body = {"query": "abc", "documents": ["xyz", {"text": "abc"}, "ab"], "model": "pairs"}
    answer = post(house, path, body).json()
    assert answer["model"] == "pairs"
    assert [item["index"] for item in answer["results"]] == [1, 2, 0]
    assert [item["document"]["text"] for item in answer["results"]] == ["abc", "ab", "xyz"]
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx([1, 2 / 3, 0])
    assert answer["usage"] == {"prompt_tokens": 9 + 9 + 8, "total_tokens": 26}


def test_rerank_of_the_best_without_their_texts(house: House) -> None:
    body = {"query": "abc", "documents": ["x", "abc", "ab"], "top_n": 2, "return_documents": False}
    results = post(house, "/rerank", body).json()["results"]
    assert [set(item) for item in results] == [{"index", "relevance_score"}] * 2
    assert post(house, "/rerank", body | {"top_n": 0}).json()["results"][2]["index"] == 0


def test_documents_are_cut(house: House) -> None:
    body = {"query": "a", "documents": ["b" * 30], "max_tokens_per_doc": 4}
    assert post(house, "/rerank", body).json()["usage"]["total_tokens"] == 3 + 4 + 1
    assert post(house, "/rerank", {"query": "a", "documents": ["b" * 30]}).status_code == 400
    body = {"query": "a", "documents": ["b" * 30], "truncate_prompt_tokens": -1}
    assert post(house, "/rerank", body).json()["usage"]["total_tokens"] == 12


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ({"text_1": "ab", "text_2": "ab"}, [1]),
        ({"text_1": "ab", "text_2": ["ab", "x"]}, [1, 0]),
        ({"text_1": ["a", "b"], "text_2": ["x", "b"]}, [0, 1]),
        ({"queries": "ab", "documents": ["a"]}, [0.5]),
    ],
)
def test_score(house: House, path: str, body: dict, scores: list[float]) -> None:
    answer = post(house, path, body).json()
    assert answer["object"] == "list"
    assert [item["score"] for item in answer["data"]] == pytest.approx(scores)
    assert [item["index"] for item in answer["data"]] == list(range(len(scores)))
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/rerank", {"documents": ["a"]}, "query", "Missing"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "at least 1"),
        ("/rerank", {"query": "a"}, "documents", "Missing"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "must not be empty"),
        ("/rerank", {"query": "a", "documents": [""]}, "documents", "must not be empty"),
        ("/rerank", {"query": "a", "documents": "a"}, "documents", "list of strings or of objects"),
        ("/rerank", {"query": "a", "documents": [{"title": "x"}]}, "documents", "field text"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048 documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "or equal to 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "return_documents": "x"}, "return_documents", "bool"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "1"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields", "not supported"),
        ("/rerank", {"query": "a", "documents": ["b"], "colour": 1}, "colour", "Unknown"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "fox"}, "model", "it has 'pairs'"),
        ("/score", {"text_1": "a"}, "text_1", "give text_1 and text_2, or queries and documents"),
        ("/score", {"text_1": "a", "documents": "b"}, "queries", "give text_1 and text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "there are 2 and 1 texts"),
        ("/score", {"text_1": 1, "text_2": "c"}, "text_1", "a string or a list of strings"),
        ("/score", {"text_1": "a", "text_2": [""]}, "text_2", "must not be empty"),
        ("/score", {"text_1": "a", "text_2": "b", "activation": False}, "activation", "not supported"),
    ],
)
def test_wrong_rerank_and_score_requests(house: House, path: str, body: dict, param: str, words: str) -> None:
    answer = post(house, path, body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert error(answer)["param"] == param
    assert words in error(answer)["message"]


@pytest.mark.parametrize("options", [{"embedding_models": PoolingModels(LetterModel())}])
def test_without_a_cross_encoder_scores_are_cosines_of_embeddings(house: House) -> None:
    """The query's prompt is two letters q."""
    answer = post(house, "/score", {"text_1": "a", "text_2": ["a", "q", "b"]}).json()
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([1 / 5**0.5, 2 / 5**0.5, 0])
    body = {"query": "a", "documents": ["b", "q"], "model": "letters"}
    assert post(house, "/rerank", body).json()["results"][0]["index"] == 1


@pytest.mark.parametrize("options", [{}])
@pytest.mark.parametrize(
    ("path", "body", "option"),
    [
        ("/v1/embeddings", {"input": "a"}, "--embedding-model"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "--rerank-model"),
        ("/score", {"text_1": "a", "text_2": "b"}, "--rerank-model"),
    ],
)
def test_without_a_model_the_answer_names_the_option(
    house: House, path: str, body: dict, option: str
) -> None:
    answer = post(house, path, body)
    assert answer.status_code == 404
    assert error(answer)["code"] == "model_not_found"
    assert option in error(answer)["message"]


def test_a_failure_inside_says_nothing_of_the_inside(house: House, model: LetterModel) -> None:
    model.poison = 25
    answer = post(house, "/v1/embeddings", {"input": "z"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert post(house, "/v1/embeddings", {"input": "a"}).status_code == 200


@pytest.mark.parametrize(
    "options", [{"request_timeout": 0.2, "embedding_models": PoolingModels(LetterModel())}]
)
def test_a_call_that_takes_too_long(house: House, options: dict) -> None:
    model = options["embedding_models"].embedding
    model.endless.set()
    answer = post(house, "/v1/embeddings", {"input": "a"})
    assert answer.status_code == 408
    assert model.closed.wait(SOON)


def test_a_quota(options: dict) -> None:
    limits = {"default": TenantTerms(limits=TenantLimits(tokens_per_minute=10))}
    house, app = build_house(options | {"rules": Rules(tenants=Tenants(limits))})
    with TestClient(app) as client:
        house.client = client
        assert post(house, "/v1/embeddings", {"input": "abcd"}).status_code == 200
        answer = post(house, "/v1/embeddings", {"input": "abcd"})
        assert answer.status_code == 429
        assert "tokens per minute: 6 used, 6 more" in error(answer)["message"]
        assert int(answer.headers["Retry-After"]) >= 1


def test_metrics_and_the_list_of_routes(house: House) -> None:
    post(house, "/v1/embeddings", {"input": ["a", "b"]})
    page = house.client.get("/metrics").text
    assert 'embedding_inputs_total{model_name="",task="embed"} 2.0' in page
    assert 'embedding_requests_total{finished_reason="stop",model_name="",task="embed"} 1.0' in page


def test_a_client_that_disconnects_frees_the_engine_thread(options: dict, model: LetterModel) -> None:
    model.endless.set()
    asyncio.run(disconnected(options, "/v1/embeddings", {"input": "a"}, model.begun))
    assert model.closed.wait(SOON)


@pytest.fixture
def priced(options: dict) -> None:
    options["pricing"] = Pricing(tokens=TokenPrices(1e6, 1e6, 1e6))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["ab", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "a"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_a_call_tells_its_cost_when_asked(priced: None, house: House, path: str, body: dict) -> None:
    silent = post(house, path, body)
    assert "cost" not in silent.json()["usage"]
    assert "X-Headrace-Cost" not in silent.headers
    for answer in (
        post(house, path, {**body, "include_cost": True, "user": "acme"}),
        post(house, path, {**body, "user": "acme"}, headers={"X-Headrace-Cost": "true"}),
    ):
        used = answer.json()["usage"]
        assert used["cost"] == used["prompt_tokens"] > 0
        assert used["cost_details"]["device_seconds"] > 0
        assert float(answer.headers["X-Headrace-Cost"].split()[0]) == used["cost"]
    [account] = house.client.get("/v1/usage?tenant=acme").json()["data"]
    assert account["cost"] == 2 * used["cost"]
    assert account["costs"][0]["requests"] == 2


def test_without_prices_no_cost_can_be_asked_for(house: House) -> None:
    answer = post(house, "/v1/embeddings", {"input": "a", "include_cost": True})
    assert (answer.status_code, error(answer)["param"]) == (400, "include_cost")
    answer = post(house, "/v1/embeddings", {"input": "a"}, headers={"X-Headrace-Cost": "true"})
    assert (answer.status_code, error(answer)["param"]) == (400, "X-Headrace-Cost")
