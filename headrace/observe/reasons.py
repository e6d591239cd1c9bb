"""The reasons in events in words, as ``GET /v1/requests/{id}`` and the log show them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from headrace.core.drafting.draft_budget import Cut
from headrace.core.events import (
    AdmitReason,
    ChunkReason,
    DeclineReason,
    MoveReason,
    PreemptReason,
    RecomputeReason,
    SkipReason,
)
from headrace.core.peers import AskReason
from headrace.core.request import RejectReason

TEXTS: Mapping[type[StrEnum], Mapping[Any, str]] = {
    AdmitReason: {
        AdmitReason.NEW: "admitted for the first time",
        AdmitReason.RESUMED: "admitted again after a preemption",
    },
    SkipReason: {
        SkipReason.NO_SLOT: "all slots are in use by other requests (--max-num-seqs)",
        SkipReason.NO_BLOCKS: "the KV cache has no room for it beside the running requests",
        SkipReason.NO_BUDGET: "the token budget of the step, or the prompt budget of its service class, is used up",
        SkipReason.BATCH_NOT_READY: "static batching: its batch is incomplete, or the previous batch has not ended",
        SkipReason.PREFIX_IN_FLIGHT: "another request is computing its prefix, which it will share",
        SkipReason.RESTORING: "blocks of its prefix are being restored from host memory, disk or a peer",
        SkipReason.ASKING_PEERS: "peers are asked for blocks of its prefix that are missing here",
        SkipReason.KV_LIMIT: "its tenant or class holds as much KV memory as it may (max_kv_tokens, max_kv_share)",
        SkipReason.NOT_IDLE: "it runs in idle time only, and the server is not idle",
        SkipReason.GRAMMAR_COMPILING: "the grammar of its structured output is being compiled",
        SkipReason.ADAPTER_LOADING: "its LoRA adapter is being brought to the device",
        SkipReason.NO_ADAPTER_PLACE: "running requests use as many other LoRA adapters as there may be (--max-loras)",
        SkipReason.STEP_FULL: "one more request would make steps slower than running requests' latency targets allow",
    },
    ChunkReason: {
        ChunkReason.WHOLE: "the whole prompt fits into one step",
        ChunkReason.BUDGET: "a longer chunk would make the step too long for the requests that decode in it",
        ChunkReason.LONG_PROMPT: "the chunks of one prompt are limited (--long-prefill-token-threshold)",
        ChunkReason.REST: "this is the last chunk of the prompt",
        ChunkReason.NO_BLOCKS: "no more blocks are free for the layers with a window",
        ChunkReason.CHECKPOINT: "the recurrent state is saved behind this chunk, where other requests can continue",
    },
    RecomputeReason: {
        RecomputeReason.NO_CHECKPOINT: "its keys and values are cached, but no recurrent state was saved within them",
        RecomputeReason.BEYOND: "its keys and values are cached, but they follow the last saved recurrent state",
        RecomputeReason.EVICTED: "its keys and values are cached, but the recurrent state saved there was evicted"
        " (--state-cache-bytes)",
    },
    PreemptReason: {
        PreemptReason.NO_BLOCKS: "the KV cache was full, and this request was chosen as the victim",
        PreemptReason.OWED: "its place was due to a request of a higher service class, or of a tenant below its share",
        PreemptReason.SLEEP: "the model was put to sleep; the request continues when it wakes up",
        PreemptReason.YIELD: "it runs in idle time only, and another request needed its slot, its blocks or its prefix",
        PreemptReason.LOST: "a rank or the engine's process was lost; it is computed again from its known tokens",
    },
    MoveReason: {
        MoveReason.EVICTED: "it was evicted from device memory",
        MoveReason.KEPT: "it was reused or has a retention priority, so it was written to disk",
        MoveReason.SAVED: "it was saved at shutdown for the next start",
        MoveReason.FETCHED: "a waiting request needs it",
        MoveReason.RESTORED: "it was in a lower tier, and restoring it was faster than computing it",
    },
    DeclineReason: {
        DeclineReason.QUICKER_TO_COMPUTE: "it is in a lower tier, but computing it is faster than restoring it",
    },
    AskReason: {
        AskReason.MISSING: "these tokens of its prefix are missing here, and pulling them is faster than computing",
    },
    Cut: {
        Cut.WHOLE: "all that was proposed was verified",
        Cut.FIXED: "the configuration fixes the length of drafts (--speculative-config)",
        Cut.NOT_WORTH: "more tokens would have taken more time than their chance of acceptance is worth",
        Cut.BUDGET: "the token budget of the step was used up",
        Cut.OTHERS: "a longer step would have slowed down requests that have no drafts",
        Cut.TPOT: "a longer step would have missed the TPOT target of a request in it",
        Cut.SLOWER: "steps with drafts have been slower than steps without, with as many requests",
        Cut.TIMES_UNKNOWN: "too few steps have been observed to know what drafts cost",
        Cut.NOTHING_PROPOSED: "nothing was proposed",
    },
    RejectReason: {
        RejectReason.QUEUE_FULL: "the queue was full (--max-num-queued-reqs)",
        RejectReason.QUEUE_TOKENS: "the queue held too many prompt tokens (--max-num-queued-tokens)",
        RejectReason.DRAINING: "the server was shutting down",
        RejectReason.PAUSED: "the server was paused by an administrator",
        RejectReason.SLEEPING: "the model was asleep",
        RejectReason.TOO_LARGE: "it was larger than the queue limits allow",
        RejectReason.TENANT_LIMIT: "its tenant had exceeded a quota (--tenants)",
    },
}


def reason_text(reason: StrEnum) -> str:
    """A reason in words."""
    return TEXTS[type(reason)][reason]
