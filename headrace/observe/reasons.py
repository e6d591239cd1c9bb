"""What the reasons in events mean, for people: one sentence each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from headrace.core.events import (
    AdmitReason,
    ChunkReason,
    DeclineReason,
    MoveReason,
    PreemptReason,
    SkipReason,
)
from headrace.core.request import RejectReason

WORDS: Mapping[type[StrEnum], Mapping[Any, str]] = {
    AdmitReason: {
        AdmitReason.NEW: "it got a slot for the first time",
        AdmitReason.RESUMED: "it got a slot again after it had been preempted",
    },
    SkipReason: {
        SkipReason.NO_SLOT: "all slots run other requests (--max-num-seqs)",
        SkipReason.NO_BLOCKS: "its keys and values do not fit into the cache beside those of the others",
        SkipReason.NO_BUDGET: "the step's tokens or its class's prompt tokens are used up",
        SkipReason.BATCH_NOT_READY: "its batch is not complete yet, or the last one has not ended",
        SkipReason.PREFIX_IN_FLIGHT: "another request is computing its prefix now; it will share that",
        SkipReason.RESTORING: "blocks of its prefix are on their way from host memory or disk",
        SkipReason.NOT_IDLE: "it only fills idle time and stands still, since the time is not idle",
        SkipReason.GRAMMAR_COMPILING: "the grammar of its structured output is being compiled",
        SkipReason.STEP_FULL: "one more would make steps slower than running requests hope for",
    },
    ChunkReason: {
        ChunkReason.WHOLE: "all of the prompt fits into one step",
        ChunkReason.BUDGET: "a longer piece would make the step too long for those that decode in it",
        ChunkReason.LONG_PROMPT: "pieces of one prompt are bounded (--long-prefill-token-threshold)",
        ChunkReason.REST: "this is the rest of the prompt",
    },
    PreemptReason: {
        PreemptReason.NO_BLOCKS: "the cache was full and this request gave way",
        PreemptReason.OWED: "a request of a better class, or of a tenant served less, was owed its place",
        PreemptReason.YIELD: "it only fills idle time, and others wanted its slot, its blocks or its prefix",
    },
    MoveReason: {
        MoveReason.EVICTED: "the device needed the room",
        MoveReason.KEPT: "it was found again or was asked to be kept, and will outlive host memory on disk",
        MoveReason.SAVED: "the engine ended; the next one may find it",
        MoveReason.FETCHED: "a request that waits will go on from it",
        MoveReason.RESTORED: "it was in a lower tier, and fetching it was quicker than computing it",
    },
    DeclineReason: {
        DeclineReason.QUICKER_TO_COMPUTE: "it lies in a lower tier, but computing it is quicker than fetching it",
    },
    RejectReason: {
        RejectReason.QUEUE_FULL: "as many requests as may wait were waiting already (--max-num-queued-reqs)",
        RejectReason.QUEUE_TOKENS: "as many prompt tokens as may wait were waiting already (--max-num-queued-tokens)",
        RejectReason.DRAINING: "the server was shutting down",
        RejectReason.TOO_LARGE: "it asked for more than may ever be taken on at once",
        RejectReason.TENANT_LIMIT: "its tenant had reached a limit of its own (--tenants)",
    },
}


def reason_text(reason: StrEnum) -> str:
    """What a reason means."""
    return WORDS[type(reason)][reason]
