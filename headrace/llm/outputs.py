"""The results of `LLM` and `AsyncLLM`: outputs of prompts, their completions and deltas; embeddings and scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.plan import TokenLogprob


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``finish_reason`` is ``stop``, ``length``, ``cancelled``, or ``failed`` with the cause in ``error``; None while the
    completion grows. ``stop_reason`` is the stop string or stop token id that ended it, None for an end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock. ``token_times`` are those of the first completion.

    ``device_seconds`` and ``cost`` are sums over all completions. The cost is 0 without ``device_price`` and prices of
    tokens; its currency is that of the prices.
    """

    arrived: float
    admitted: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    device_seconds: float = 0.0
    cost: float = 0.0

    @property
    def first_token(self) -> float:
        """The time of the first token; for a request without tokens, of its end."""
        return self.token_times[0] if self.token_times else self.finished


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions; ``prompt_logprobs`` score its tokens from the second on."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The addition to one completion since its last delta.

    ``prompt_index`` counts the prompts of the call and ``index`` the completions of the prompt, both from 0. ``text``
    has whole characters and no part of a stop string, so it may be empty while ``token_ids`` are not.
    ``finish_reason`` is set in the last delta of a completion. ``output`` is the whole output of the prompt so far.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one input, and the tokens that it was computed from."""

    embedding: list[float]
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The score of one pair of texts; higher means more relevant."""

    score: float
