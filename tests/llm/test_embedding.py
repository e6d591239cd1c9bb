"""`LLM.embed` and `LLM.score`: a model for embeddings alone, and beside one that generates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM
from headrace.config import ConfigError
from headrace.core.request import InvalidParameter, SamplingParams
from headrace.llm import AsyncLLM
from tests.doubles.tiny_encoder import write_cross_encoder, write_embedding_model

TEXTS = ["a b c", "d", "e f g h i j"]


def test_an_encoder_alone(tmp_path: Path) -> None:
    with LLM(str(write_embedding_model(tmp_path))) as llm:
        outputs = llm.embed(TEXTS, progress=False)
        found = np.array([each.embedding for each in outputs])
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        assert [len(each.prompt_token_ids) for each in outputs] == [5, 3, 8]
        [alone] = llm.embed(TEXTS[2], progress=False)
        np.testing.assert_allclose(alone.embedding, found[2], atol=1e-5)
        [tokens] = llm.embed(outputs[0].prompt_token_ids, progress=False)
        np.testing.assert_allclose(tokens.embedding, found[0], atol=1e-5)
        scores = [each.score for each in llm.score(TEXTS[0], TEXTS, progress=False)]
        np.testing.assert_allclose(scores, found @ found[0], atol=1e-5)
        [short] = llm.embed("a", dimensions=2, normalize=False, progress=False)
        assert len(short.embedding) == 2
        with pytest.raises(RuntimeError, match="generates no text"):
            llm.generate("a")
    with pytest.raises(RuntimeError, match="closed"):
        llm.embed("a")


def test_a_cross_encoder_alone(tmp_path: Path) -> None:
    with LLM(str(write_cross_encoder(tmp_path))) as llm:
        one = llm.score("a b", ["c", "d e"], progress=False)
        each = llm.score(["a b", "a b"], ["c", "d e"], progress=False)
        assert [output.score for output in one] == pytest.approx([output.score for output in each])
        assert all(0 < output.score < 1 for output in one)
        with pytest.raises(ConfigError, match="no embedding model"):
            llm.embed("a")
        with pytest.raises(InvalidParameter, match="2 queries for 3 documents"):
            llm.score(["a", "b"], ["c", "d", "e"])


def test_beside_a_model_that_generates(tmp_path: Path) -> None:
    tiny = write_embedding_model(tmp_path)
    with LLM("builtin", embedding_model=str(tiny), kv_cache_memory_bytes="32MiB") as llm:
        assert len(llm.embed("a", progress=False)[0].embedding) == 8
        [output] = llm.generate("Once", SamplingParams(max_tokens=3), progress=False)
        assert output.outputs[0].token_ids
        for wrong, reported in (
            ({"dimensions": 1.5}, "dimensions must be an integer, got 1.5"),
            ({"normalize": "no"}, "normalize must be True or False, got 'no'"),
            ({"prompt_name": 5}, "prompt_name must be text, got 5"),
            ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens must be an integer, got '5'"),
        ):
            with pytest.raises(InvalidParameter, match=reported):
                llm.embed("a", **wrong, progress=False)
        with pytest.raises(InvalidParameter, match=r"inputs must be text, .*, got NoneType"):
            llm.embed(None)
        with pytest.raises(InvalidParameter, match=r"documents\[1\] must be text, got int"):
            llm.score("a", ["b", 5])
        with pytest.raises(InvalidParameter, match="queries must be text or a list of texts, got int"):
            llm.score(5, ["b"])
        for wrong in ({"dimensions": 9}, {"prompt_name": "x"}, {"truncate_prompt_tokens": 99}):
            with pytest.raises(InvalidParameter):
                llm.embed("a", **wrong, progress=False)


def test_the_model_that_generates_embeds_too() -> None:
    with LLM("builtin", embedding_model="builtin", kv_cache_memory_bytes="32MiB") as llm:
        texts = ["Once upon a time", "Hello there", "Once upon a time"]
        one, other, same = (each.embedding for each in llm.embed(texts, progress=False))
        np.testing.assert_allclose(one, same, atol=1e-2)
        assert np.dot(one, other) < 0.999


def test_models_and_options_that_do_not_fit(tmp_path: Path) -> None:
    tiny = str(write_embedding_model(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match="already the model for this"):
        LLM(tiny, embedding_model=tiny)
    with pytest.raises(ConfigError, match="generates no text: name it with embedding_model"):
        AsyncLLM(tiny)
    with pytest.raises(ConfigError, match=r"MODEL: .*pooling max_tokens"):
        LLM(str(write_embedding_model(tmp_path / "max", "max_tokens")))


def test_the_engines_thread_embeds_beside_requests(tmp_path: Path) -> None:
    tiny, cross = write_embedding_model(tmp_path / "tiny"), write_cross_encoder(tmp_path / "cross")
    given = {"embedding_model": str(tiny), "rerank_model": str(cross), "kv_cache_memory_bytes": "32MiB"}
    with LLM("builtin", **given) as llm:
        expected = [each.embedding for each in llm.embed(TEXTS, progress=False)]
        scores = [each.score for each in llm.score("a b", ["c", "d e"], progress=False)]

    async def main() -> None:
        async with AsyncLLM("builtin", **given) as llm:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            vectors, scored, [output] = await asyncio.gather(
                llm.embed(TEXTS), llm.score("a b", ["c", "d e"]), llm.generate("Once", params)
            )
            np.testing.assert_allclose([each.embedding for each in vectors], expected, atol=1e-5)
            assert [each.score for each in scored] == pytest.approx(scores)
            assert len(output.outputs[0].token_ids) == 20
            assert await llm.embed([]) == []
            for wrong in ({"dimensions": 9}, {"prompt_name": "x"}, {"truncate_prompt_tokens": 99}):
                with pytest.raises(InvalidParameter):
                    await llm.embed("a", **wrong)
            many = asyncio.create_task(llm.embed(["a b c"] * 2000))
            while not llm._worker.open_calls:
                await asyncio.sleep(0)
            many.cancel()
            await asyncio.wait([many])
            assert many.cancelled()
            assert not llm._worker.open_calls

    asyncio.run(main())


def test_without_a_model_the_options_are_named() -> None:
    async def main() -> None:
        async with AsyncLLM("builtin", kv_cache_memory_bytes="32MiB") as llm:
            with pytest.raises(ConfigError, match="embedding_model"):
                await llm.embed("a")
            with pytest.raises(ConfigError, match="rerank_model"):
                await llm.score("a", "b")

    asyncio.run(main())
