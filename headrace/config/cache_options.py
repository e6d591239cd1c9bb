"""Options of the caches of responses: exact, semantic, and computed ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.values import BYTES, SECONDS


@dataclass(frozen=True, slots=True)
class ResponseCacheOptions:
    """Which responses are stored and served to equal requests, and where they are stored."""

    response_cache: Annotated[
        tuple[str, ...],
        Field(
            description="Store for responses of repeatable requests: memory, sqlite:PATH, redis://HOST:PORT/DB or "
            "memcached://HOST:PORT. Repeatable, fastest first (default: no response cache)."
        ),
    ] = ()
    response_cache_bytes: Annotated[
        int,
        Field(
            ge=1 << 16,
            description="Memory limit of the in-process response cache.",
            json_schema_extra=BYTES,
        ),
    ] = 256 << 20
    response_cache_disk_bytes: Annotated[
        int,
        Field(ge=1 << 20, description="Size limit of a SQLite response cache.", json_schema_extra=BYTES),
    ] = 4 << 30
    response_cache_ttl: Annotated[
        float,
        Field(
            gt=0,
            description="Time to live of a cached response, unless its request sets another.",
            json_schema_extra=SECONDS,
        ),
    ] = 3600.0
    response_cache_timeout: Annotated[
        float,
        Field(
            gt=0,
            description="Maximum time of a lookup in SQLite, Redis or Memcached; a slower one is a miss.",
            json_schema_extra=SECONDS,
        ),
    ] = 0.02
    response_cache_secret: Annotated[
        str | None,
        Field(
            description="Secret that signs cached responses; required for Redis and Memcached, the same on all "
            "servers. Set HEADRACE_RESPONSE_CACHE_SECRET instead of the flag."
        ),
    ] = None
    response_cache_pace: Annotated[
        Literal["immediate", "original"],
        Field(description="Speed at which a cached response is streamed: at once, or as it was generated."),
    ] = "immediate"
    resume_cache_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Memory for unfinished responses, which a repeated request continues; 0 stores none.",
            json_schema_extra=BYTES,
        ),
    ] = 16 << 20


@dataclass(frozen=True, slots=True)
class SemanticOptions:
    """Whether similar requests may receive cached responses, and within which error bound."""

    semantic_cache: Annotated[
        Literal["off", "shadow", "draft", "serve"],
        Field(
            description="Use of a similar request's cached response. shadow: only record what would be served; "
            "serve: return it; draft: propose it to speculative decoding, which changes no response."
        ),
    ] = "off"
    semantic_calibration: Annotated[
        str | None, Field(description="Calibration file written by headrace cache calibrate.")
    ] = None
    semantic_max_error: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="Maximum share of wrong responses among those served; the server starts only if the "
            "calibration proves it.",
        ),
    ] = 0.01
    semantic_threshold: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Least cosine similarity to serve from, by hand, in place of the certified threshold. No error "
            "bound holds for it; the start and /v1/cache/stats report what labelled requests show (default: none).",
        ),
    ] = None
    semantic_labels: Annotated[
        str | None,
        Field(
            description="SQLite file of labels for pairs of similar requests, without their text, from headrace cache "
            "pairs import. A tenant with enough labels gets its own certificate (default: none)."
        ),
    ] = None
    semantic_encoder: Annotated[
        str,
        Field(
            description="Sentence-transformers folder or Hugging Face name; the same as in the calibration."
        ),
    ] = "all-MiniLM-L6-v2"
    semantic_judge: Annotated[
        str | None,
        Field(
            description="Second judge of similar requests. A folder or Hugging Face name of a cross-encoder, the same "
            "as in the calibration; or self: the served model compares pairs of requests in idle time, and only pairs "
            "that it has called the same are served."
        ),
    ] = None
    semantic_deadline: Annotated[
        float,
        Field(
            gt=0,
            description="Maximum time of a semantic lookup; a slower one is a miss.",
            json_schema_extra=SECONDS,
        ),
    ] = 0.015
    semantic_audit: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of semantic hits that are also computed, to check the error bound, 0 to 1.",
        ),
    ] = 0.02
    semantic_cache_bytes: Annotated[
        int,
        Field(
            ge=1 << 16,
            description="Memory limit for requests and embeddings of the semantic cache.",
            json_schema_extra=BYTES,
        ),
    ] = 512 << 20


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """Which responses are computed ahead of time, and when the server counts as idle."""

    history_file: Annotated[
        str | None,
        Field(
            description="SQLite file of how often and when requests recur, stored as hashes (default: none)."
        ),
    ] = None
    record_history: Annotated[
        bool,
        Field(
            description="Also store the requests' text in --history-file, so that they can be computed ahead."
        ),
    ] = False
    warm_below_rate: Annotated[
        float,
        Field(gt=0, description="Request rate per second below which the server counts as idle."),
    ] = 0.5
    warm_batch: Annotated[
        int, Field(ge=1, le=1024, description="Maximum number of requests that are computed ahead at once.")
    ] = 16
    warm_seconds_per_hour: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="Device time per hour for computing ahead.",
            json_schema_extra=SECONDS,
        ),
    ] = 600.0
    warm_before_ready: Annotated[
        float,
        Field(
            ge=0,
            description="Maximum time that /health/ready waits for the history's requests to be computed.",
            json_schema_extra=SECONDS,
        ),
    ] = 0.0
