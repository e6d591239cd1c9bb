"""Converts Dynamo's requests to sampling parameters, and emitted tokens to its chunks. It does not import Dynamo.

Dynamo's frontend applies the chat template, tokenizes, finds stop strings and detokenizes. A request is a dictionary
with ``token_ids``, ``sampling_options``, ``stop_conditions`` and ``output_options``; None counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, InvalidParameter, SamplingParams

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "include_stop_str_in_output"),
)
"""Sampling options that have the same name and meaning in both."""

NEUTRAL_PARAMS = SamplingParams()

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),  # Dynamo ends the stream of a request with its first choice
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "max_thinking_tokens": (),
    "prompt_logprobs": (),
}
"""Options that are not supported, with their neutral values."""

FOREIGN = ("multi_modal_data", "prefill_result", "bootstrap_info", "encoder_result")
"""Fields of multimodal requests and of disaggregated prefill and decode, which are not supported."""

GUIDED = ("json", "regex", "choice", "grammar", "structural_tag")

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}
"""Dynamo's finish reasons of requests that did not fail."""


class WorkerRequest(NamedTuple):
    """A request of Dynamo.

    A lower ``priority`` runs sooner. ``end_tokens`` end the output in addition to those of the model. Requests share
    cached prefixes only with requests of the same ``salt``.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: str
    end_tokens: frozenset[int]


def read_request(body: Mapping[str, Any], defaults: SamplingParams = NEUTRAL_PARAMS) -> WorkerRequest:
    """A request as Dynamo's frontend sends it, with the ``defaults`` of sampling parameters that it does not give.

    Raises:
        InvalidParameter: a field has a wrong value, or is not supported; the error names it.
    """
    for name in FOREIGN:
        if body.get(name):
            raise InvalidParameter(name, f"{name} is not supported by this worker")
    sampling, stops = _given(body, "sampling_options"), _given(body, "stop_conditions")
    output = _given(body, "output_options")
    for name, neutral in NEUTRAL.items():
        value = (sampling | stops | output).get(name)
        if value is not None and value not in neutral:
            raise InvalidParameter(name, f"{name} {value!r} is not supported by this worker")
    values: dict[str, Any] = {name: sampling[name] for name in SAMPLING if name in sampling}
    values |= {name: stops[name] for name in ("max_tokens", "min_tokens", "ignore_eos") if name in stops}
    hidden = (*stops.get("stop_token_ids", ()), *stops.get("stop_token_ids_hidden", ()))
    params = replace(
        defaults,
        **values,
        logprobs=output.get("logprobs"),
        stop_token_ids=tuple(dict.fromkeys(hidden)),
        structured_outputs=_guided(sampling.get("guided_decoding")),  # type: ignore[arg-type]
    )
    return WorkerRequest(
        tokens=tuple(body["token_ids"]),
        params=params,
        priority=-int(_given(body, "routing").get("priority", 0)),  # Dynamo's higher numbers run sooner
        salt=str(_given(_given(body, "extra_args"), "nvext").get("cache_salt", "")),
        end_tokens=frozenset(body.get("eos_token_ids") or ()),
    )


def _given(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in (body.get(name) or {}).items() if value is not None}


def _guided(guided: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The object of ``structured_outputs``; its errors are those of `SamplingParams`."""
    given = {name: guided[name] for name in GUIDED if guided.get(name) is not None} if guided else {}
    if given and guided and guided.get("whitespace_pattern") is not None:
        given["whitespace_pattern"] = guided["whitespace_pattern"]
    return given or None


def token_chunk(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    text: Callable[[int], str],
    alternatives: int | None,
) -> dict[str, Any]:
    """Tokens of an output; ``alternatives`` is the requested number of top logprobs (None: no logprobs)."""
    chunk: dict[str, Any] = {"token_ids": list(tokens), "index": 0}
    if alternatives is not None and logprobs:
        chunk["log_probs"] = [each.logprob for each in logprobs]
        chunk["top_logprobs"] = [_ranked(each, alternatives, text) for each in logprobs]
    return chunk


def _ranked(chosen: TokenLogprob, alternatives: int, text: Callable[[int], str]) -> list[dict[str, Any]]:
    ranked = [(chosen.rank, chosen.token, chosen.logprob)]
    ranked += [
        (rank, token, logprob)
        for rank, (token, logprob) in enumerate(chosen.top[:alternatives], start=1)
        if token != chosen.token
    ]
    return [
        {"rank": rank, "token_id": token, "token": text(token), "logprob": logprob}
        for rank, token, logprob in ranked
    ]


def final_chunk(reason: FinishReason, prompt: int, cached: int, output: int) -> dict[str, Any]:
    """The end of an output; ``prompt``, ``cached`` and ``output`` count its tokens.

    Raises:
        KeyError: ``reason`` is an error, which is reported to Dynamo as an exception.
    """
    return {
        "token_ids": [],
        "index": 0,
        "finish_reason": REASONS[reason],
        "completion_usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }
