"""A request and its parameters, as frozen values.

A `Request` is parsed, rendered and tokenized before it reaches the core. It contains no text except stop strings, which
only `text.stream` matches. Next in the request's path: `core.tenancy.gate` decides, `core.engine` takes the request.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.constraint import Constraint, ConstraintKind, UnusableConstraint, as_constraint
from headrace.core.images import ImageSpan

# Settings that each request carries, so that requests served side by side may have different ones.
#
# They are settings whose effect stays with the request: how it is drafted for, which cached responses may serve it, how
# long it may take. What all requests of a step share (its size, the order of the queue) is in `core.knobs`. Experiments
# compare values of these settings on a part of the requests.

ALL_METHODS = "all"
"""The ``draft_method`` that leaves the choice to the drafter."""

NO_METHOD = "none"
"""The ``draft_method`` of a request that is not drafted for."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """The settings of one request; None leaves a setting to the server.

    ``draft_method`` names the only method of speculative decoding that may propose tokens (or `ALL_METHODS`, or
    `NO_METHOD`); ``draft_tokens`` bounds the tokens drafted in a step. ``semantic_min_similarity`` is the smallest
    cosine at which the response of a similar request is served, beside the calibrated threshold, which always holds.
    ``request_timeout`` (seconds) ends the request.
    """

    draft_method: str = ALL_METHODS
    draft_tokens: int | None = None
    semantic_min_similarity: float = 0.0
    request_timeout: float | None = None

    def may_draft(self, method: str) -> bool:
        """Whether this method of drafting may propose tokens."""
        return self.draft_method in (ALL_METHODS, method)

    def limit_drafted(self, count: int) -> int:
        """``count``, limited to the tokens that may be drafted in a step."""
        if self.draft_method == NO_METHOD:
            return 0
        return count if self.draft_tokens is None else min(count, self.draft_tokens)


NO_SETTINGS = RequestSettings()
"""No setting of its own: the server's configuration applies."""


class RejectReason(StrEnum):
    """Why the server rejects a request at admission."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    DRAINING = "draining"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    TOO_LARGE = "too_large"
    TENANT_LIMIT = "tenant_limit"


class FinishReason(StrEnum):
    """Why a request ended; every submitted request ends with exactly one of them."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    REJECTED = "rejected"
    FAILED = "failed"


class InvalidParameter(ValueError):
    """A request parameter outside its range; `param` names the field as the client spelled it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


MAX_COUNT = 2**31 - 1
"""The largest count that a parameter may ask for."""

MIN_REPETITION_PENALTY = 1e-6
"""The lower bound: a smaller divisor may take a logit out of the range of single precision."""

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_COUNTS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_STRINGS, _WORDS = "a string or a list of strings", "a list of lists of token ids"
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


def _require_type(param: str, value: object, kinds: tuple[type, ...], shown: str) -> None:
    optional = value is None and param in _OPTIONAL
    if not optional and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        raise InvalidParameter(param, f"{param} must be {shown}, got {value!r:.80}")


def _listed(param: str, values: object, shown: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InvalidParameter(param, f"{param} must be {shown}, got {values!r:.80}")
    return tuple(values)


def _integers(param: str, values: object) -> tuple[int, ...]:
    listed = _listed(param, values, "a list of integers")
    for value in listed:
        _require_type(param, value, (int,), "a list of integers")
    return listed


def _biases(values: object) -> tuple[tuple[int, float], ...]:
    """The pairs of a mapping, or of a list of pairs."""
    shown = "a mapping of token ids to numbers"
    listed = _listed("logit_bias", values.items() if isinstance(values, Mapping) else values, shown)
    try:
        pairs = tuple((token, bias) for token, bias in listed)
    except (TypeError, ValueError):
        raise InvalidParameter("logit_bias", f"logit_bias must be {shown}, got {values!r:.80}") from None
    if not {type(token) for token, _ in pairs} <= {int}:
        raise InvalidParameter("logit_bias", "logit_bias must have integers as token ids")
    if not {type(bias) for _, bias in pairs} <= {int, float}:
        raise InvalidParameter("logit_bias", "logit_bias must have numbers as values")
    return pairs


def _constraint(value: object) -> Constraint:
    try:
        return as_constraint(value)
    except UnusableConstraint as error:
        raise InvalidParameter("structured_outputs", f"structured_outputs: {error}") from None


def _require(param: str, value: float, low: float, high: float, shown: str) -> None:
    if not low <= value <= high:  # not a number is neither
        raise InvalidParameter(param, f"{param} must be {shown}, got {value!r:.80}")


def _require_count(param: str, value: int | None, low: int) -> None:
    if value is not None and not low <= value <= MAX_COUNT:
        bound = f"at least {low}" if value < low else f"at most {MAX_COUNT}"
        raise InvalidParameter(param, f"{param} must be {bound}, got {value!r:.80}")


SEED_BITS = 63
"""Seeds of requests are below two to this power."""


def choice_seed(seed: int, index: int) -> int:
    """The seed of a call's choice ``index``: ``seed`` itself for the first, numbers without a pattern for the others.

    Consecutive seeds would let the second choice of a call repeat the first one of a call with the next seed.
    """
    if index == 0:
        return seed % (1 << SEED_BITS)
    digest = hashlib.blake2b(b"%d %d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (1 << SEED_BITS)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and end conditions of one request.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch their filter off. ``logprobs``
    and ``prompt_logprobs`` set the number of alternatives beside the chosen token (0: only the chosen one; None:
    none). Penalties follow OpenAI (presence, frequency: output tokens only) and CTRL (repetition: prompt and output,
    arXiv:1909.05858). ``bad_words`` are token sequences that must not be completed. ``max_tokens`` None means: up to
    the maximum context length. ``structured_outputs`` constrains the text: a `Constraint`, or an object such as
    ``{"json": schema}`` (see `core.constraint.as_constraint`).

    Raises:
        InvalidParameter: a field is outside its range; the error names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Constraint | None = None

    def __post_init__(self) -> None:
        self._normalize_types()
        _require("temperature", self.temperature, 0.0, 100.0, "between 0 and 100")
        _require("top_p", self.top_p, math.ulp(0.0), 1.0, "above 0 and at most 1")
        _require("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            1e6,
            "between 0.000001 and 1000000",
        )
        _require("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2")
        _require("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2")
        _require_count("top_k", self.top_k, -1)
        _require_count("max_tokens", self.max_tokens, 1)
        _require_count("min_tokens", self.min_tokens, 0)
        _require_count("logprobs", self.logprobs, 0)
        _require_count("prompt_logprobs", self.prompt_logprobs, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        for _, bias in self.logit_bias:
            _require("logit_bias", bias, -100.0, 100.0, "between -100 and 100")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", "allowed_token_ids must not be empty")
        if any(not word for word in self.bad_words):
            raise InvalidParameter("bad_words", "bad_words must not contain an empty word")
        if any(not text for text in self.stop):
            raise InvalidParameter("stop", "stop must not contain an empty string")
        constraint = self.structured_outputs
        if constraint is not None and constraint.kind is not ConstraintKind.TEXT and self.ignore_eos:
            message = (
                "ignore_eos cannot be used with structured outputs: the answer ends where its grammar does"
            )
            raise InvalidParameter("ignore_eos", message)

    def _normalize_types(self) -> None:
        """Reject wrong types by name; convert lists, a single stop string and a mapping of biases to tuples."""
        for param in _NUMBERS:
            _require_type(param, getattr(self, param), (int, float), "a number")
        for param in _COUNTS:
            _require_type(param, getattr(self, param), (int,), "an integer")
        for param in _SWITCHES:
            _require_type(param, getattr(self, param), (bool,), "true or false")
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop, _STRINGS)
        for text in stop:
            _require_type("stop", text, (str,), _STRINGS)
        values: dict[str, object] = {
            "stop": stop,
            "stop_token_ids": _integers("stop_token_ids", self.stop_token_ids),
            "logit_bias": _biases(self.logit_bias),
            "bad_words": tuple(
                _integers("bad_words", word) for word in _listed("bad_words", self.bad_words, _WORDS)
            ),
        }
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = _integers("allowed_token_ids", self.allowed_token_ids)
        if self.structured_outputs is not None:
            values["structured_outputs"] = _constraint(self.structured_outputs)
        for param, value in values.items():
            object.__setattr__(self, param, value)


class Slo(NamedTuple):
    """Latency targets: time to first token and mean time per further token, in seconds (None: no target).

    Unlike a deadline, a missed target ends nothing. It orders the queue and is counted (goodput).
    """

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


NO_SLO = Slo()


class Retention(NamedTuple):
    """Retention priority of the KV of prompt tokens ``[start, end)``; ``end`` None means the end of the prompt.

    ``priority`` is 0 to 100; higher is retained longer. Blocks without one have `DEFAULT_RETENTION`, to which the
    priority falls back after ``seconds`` (None: never).
    """

    start: int
    end: int | None
    priority: int
    seconds: float | None = None


DEFAULT_RETENTION = 35


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: its tokens, sampling parameters, tenant and deadline.

    ``arrived`` and ``deadline`` are seconds on the clock of `Engine.step`; a request ends at its deadline.
    ``model`` is the name of the model or adapter that the client chose, by which limits count (empty: the model's).
    ``service_class`` names the class whose share the request uses; ``priority`` (lower runs sooner) orders it within
    the class. ``salt`` partitions the prefix cache: only requests with equal ``salt`` and ``adapter`` share blocks.
    ``seed`` is the resolved seed of the sampler's counter-based generator: the client's, or one drawn when the
    request was parsed. ``affinity`` names a group of similar requests that gain from running together (empty: none).
    ``peer`` names the one server that is asked for blocks that are missing here (empty: all peers are); it is asked
    again while it computes the prompt, if the request ``follows`` it.
    ``answered`` are the known first tokens of the answer, at most ``max_tokens``. They are not sampled or emitted
    again, and count as output everywhere (length, penalties, ``min_tokens``, the sampler's position).
    ``prediction`` is what the client expects the answer to be, ``cached_answer`` a cached answer to a similar request.
    Both are drafts only: they change no answer. ``indexed``: later requests may be drafted from the answer.
    ``call_format`` names the format of the tool call that ends the answer (empty: none); as for stop strings, the
    reader of the text ends it. ``settings`` are those in which requests served side by side may differ. ``images``
    fill positions of the prompt, in ascending order: see `core.images`.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrived: float = 0.0
    tenant: str = "default"
    service_class: str = "default"
    priority: int = 0
    deadline: float | None = None
    slo: Slo = NO_SLO
    retention: tuple[Retention, ...] = ()
    peer: str = ""
    follows: bool = False
    affinity: str = ""
    answered: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    cached_answer: tuple[int, ...] = ()
    indexed: bool = True
    salt: str = ""
    adapter: str = ""
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    call_format: str = ""
    settings: RequestSettings = NO_SETTINGS
    model: str = ""
    images: tuple[ImageSpan, ...] = ()
