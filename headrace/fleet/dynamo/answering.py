"""Serves Dynamo's requests with a service: one engine request for each, with its events as chunks.

Dynamo's frontend applies the chat template, tokenizes, finds stop strings and detokenizes. A request is a dictionary
with ``token_ids``, ``sampling_options``, ``stop_conditions`` and ``output_options``; None counts as absent.

It does not import Dynamo; `backend` connects it to Dynamo's runtime.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.core.capacity import NO_WINDOWS, WindowGroups, why_unservable
from headrace.core.constraint import Constraint
from headrace.core.events import Emitted, Finished
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, InvalidParameter, Request, SamplingParams
from headrace.service.answer import Answer
from headrace.service.service import Service
from headrace.text.tokenizer import Tokenizer

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
            raise InvalidParameter(name, f"{name} {value!r:.80} is not supported by this worker")
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


logger = logging.getLogger("headrace.fleet")


SEED_BITS = 63


class RequestFailed(Exception):
    """A request ended without its complete output."""


class Answering:
    """Answers requests on the running loop until `drain`.

    Limits of a request: ``max_model_len`` tokens including its output, and ``num_blocks`` KV blocks of ``block_size``
    tokens. Token ids are below ``vocab_size``. ``check`` raises `UnusableConstraint`; it may block.
    ``defaults`` apply where a request gives no sampling parameters.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        check: Callable[[Constraint], None],
        defaults: SamplingParams = NEUTRAL_PARAMS,
        windows: WindowGroups = NO_WINDOWS,
    ) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._windows = windows
        self._vocab_size = vocab_size
        self._check = check
        self._defaults = defaults
        self._answers: dict[str, Answer] = {}

    async def generate(self, body: Mapping[str, Any], name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens as they come, and the end. ``name`` identifies the request.

        Raises:
            InvalidParameter, UnusableConstraint: the request cannot be served.
            Refused: the queue is full or the worker drains.
            RequestFailed: it could not be completed.
        """
        asked = read_request(body, self._defaults)
        if asked.params.structured_outputs is not None:
            await asyncio.to_thread(self._check, asked.params.structured_outputs)
        request = self._request(asked, name)
        sizes = self.max_model_len, self.num_blocks, self.block_size, self._windows
        if problem := why_unservable(request, *sizes):
            raise InvalidParameter("token_ids", problem)
        answer = self._answers[name] = self.service.open([request])
        try:
            async for chunk in self._chunks(asked, answer):
                yield chunk
        finally:
            del self._answers[name]
            self.service.close(answer)

    def abort(self, name: str) -> None:
        """Cancel a request of a disconnected client before the engine's next step. Unknown ones have already ended."""
        answer = self._answers.get(name)
        if answer is not None:
            self.service.withdraw(answer, FinishReason.CANCELLED)

    async def drain(self, seconds: float) -> None:
        """Reject new requests, and cancel those that are still open after ``seconds``."""
        if not await self.service.drain(seconds):
            logger.warning("%d requests were cut off", self.service.open_requests())
            self.service.close_all()

    def _request(self, asked: WorkerRequest, name: str) -> Request:
        wrong = next((token for token in asked.tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise InvalidParameter("token_ids", f"token id {wrong}: ids are 0 to {self._vocab_size - 1}")
        return Request(
            id=name,
            tokens=asked.tokens,
            params=asked.params,
            arrived=self.service.now(),
            priority=asked.priority,
            salt=asked.salt,
            seed=secrets.randbits(SEED_BITS) if asked.params.seed is None else asked.params.seed,
            eos_token_ids=self.tokenizer.eos_token_ids | asked.end_tokens,
        )

    async def _chunks(self, asked: WorkerRequest, answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
        while not answer.exhausted:
            for _, event in await answer.read():
                if isinstance(event, Emitted):
                    wanted = asked.params.logprobs
                    yield token_chunk(event.tokens, event.logprobs, self._text, wanted)
                elif isinstance(event, Finished):
                    if event.reason not in REASONS:
                        raise RequestFailed(event.message or str(event.reason))
                    (cached,) = answer.cached_tokens
                    yield final_chunk(event.reason, len(asked.tokens), cached, event.output_tokens)

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])
