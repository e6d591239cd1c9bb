"""The bodies of ``POST /v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation

from headrace.api.errors import invalid
from headrace.api.wire import NotYet, Wire, is_token_ids, wrong_type, wrong_value
from headrace.service.embedding_models import MAX_INPUTS

MAX_TOKENS = 2**31 - 1
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"

_ANYWHERE: dict[str, tuple[object, ...]] = {
    "priority": (0,),
    "add_special_tokens": (True,),
    "mm_processor_kwargs": ({},),
    "truncation_side": (),
}
_SCORES = _ANYWHERE | {"activation": (True,), "use_activation": (True,), "softmax": (True,)}

EMBEDDINGS: NotYet = _ANYWHERE | {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "embedding_types": (["float"],),
}
RERANK: NotYet = _SCORES | {"rank_fields": ([],), "max_chunks_per_doc": ()}
SCORE: NotYet = _SCORES | {"data_1": (), "data_2": (), "items": ()}


def _counted(values: Sequence[Any], what: str) -> None:
    """Raise unless there are 1 to `MAX_INPUTS` values, none of them empty."""
    if len(values) > MAX_INPUTS:
        raise wrong_value(f"must have at most {MAX_INPUTS} {what}, got {len(values)}")
    if not values or not all(values):
        raise wrong_value("must not be empty")


def _inputs(value: Any) -> Any:
    """A list of texts or of lists of token ids."""
    if isinstance(value, str):
        inputs: Any = [value]
    elif is_token_ids(value) and value:
        inputs = [value]
    else:
        inputs = value
    if not isinstance(inputs, list):
        raise wrong_type(_FORMS)
    if not (all(isinstance(each, str) for each in inputs) or all(map(is_token_ids, inputs))):
        raise wrong_type(_FORMS)
    _counted(inputs, "inputs")
    return inputs


def _texts(value: Any) -> Any:
    """A list of texts."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise wrong_type("a string or a list of strings")
    _counted(texts, "texts")
    return texts


def _documents(value: Any) -> Any:
    """A list of texts; a document may also be an object with its text."""
    expected = "a list of strings or of objects with a field text"
    if not isinstance(value, list):
        raise wrong_type(expected)
    texts = []
    for each in value:
        text = each.get("text") if isinstance(each, dict) and set(each) == {"text"} else each
        if not isinstance(text, str):
            raise wrong_type(expected)
        texts.append(text)
    _counted(texts, "documents")
    return texts


Texts = Annotated[SkipValidation[list[str] | None], BeforeValidator(_texts)]


class PoolingBody(Wire):
    """The fields that all of these endpoints have."""

    model: str | None = None
    user: str | None = Field(None, max_length=512)
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Cut longer inputs to this many tokens; -1: to the model's limit.",
    )
    include_cost: bool | None = Field(None, description="Add `cost` and `cost_details` to `usage`.")


class EmbeddingBody(PoolingBody):
    """Texts to convert to vectors."""

    input: Annotated[SkipValidation[list[str] | list[list[int]]], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Truncate each vector to this many numbers.")
    normalize: bool | None = Field(
        None, description="Whether vectors are scaled to length 1 (default: as in the model's files)."
    )
    prompt_name: str | None = Field(None, description="Name of the model's prompt to put before each text.")


class RerankBody(PoolingBody):
    """Documents to order by their relevance for a query."""

    query: str = Field(min_length=1)
    documents: Annotated[SkipValidation[list[str]], BeforeValidator(_documents)]
    top_n: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Return only this many documents; 0: all."
    )
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Cut longer documents.")


class ScoreBody(PoolingBody):
    """Pairs of texts to score; one text is paired with each of several."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = Field(None, description="Another name of text_1.")
    documents: Texts = Field(None, description="Another name of text_2.")

    def sides(self) -> tuple[list[str] | None, list[str] | None]:
        """The first and the second texts."""
        if self.queries is not None or self.documents is not None:
            return self.queries, self.documents
        return self.text_1, self.text_2

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score.

        Raises:
            ApiError: a side is missing or given twice, or the numbers of texts do not match.
        """
        one, other = self.sides()
        named = self.queries is not None or self.documents is not None
        numbered = self.text_1 is not None or self.text_2 is not None
        if named == numbered or one is None or other is None:
            raise invalid(
                "give text_1 and text_2, or queries and documents", "queries" if named else "text_1"
            )
        if len(one) not in (1, len(other)):
            raise invalid(
                f"there are {len(one)} and {len(other)} texts: give one, or as many as on the other side",
                "queries" if named else "text_1",
            )
        firsts = one * len(other) if len(one) == 1 else one
        return list(zip(firsts, other, strict=True))
