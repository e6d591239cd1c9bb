"""Everything that happens, told once, each with its reason.

Metrics, the page, explanations, traces and tests are folds over this one stream. Whoever
folds them is given ``now`` beside them (see `core.ports.Watcher`), which is the end of the step that told them. The two
that happen before that step's work carry their own time in ``at`` (None: when it is told).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from headrace.core.plan import Tier, TokenLogprob
from headrace.core.request import NO_SLO, FinishReason, RejectReason, Request, Slo


class Layer(StrEnum):
    """Who spared the computing."""

    EXACT = "exact"
    SEMANTIC = "semantic"
    PREFIX = "prefix"
    PARTIAL = "partial"
    COALESCED = "coalesced"


class AdmitReason(StrEnum):
    NEW = "new"
    RESUMED = "resumed"


class SkipReason(StrEnum):
    """Why a waiting request was not admitted in a step, or a running one stands still."""

    NO_SLOT = "no_slot"
    NO_BLOCKS = "no_blocks"
    NO_BUDGET = "no_budget"
    BATCH_NOT_READY = "batch_not_ready"
    PREFIX_IN_FLIGHT = "prefix_in_flight"
    STEP_FULL = "step_full"
    RESTORING = "restoring"
    NOT_IDLE = "not_idle"
    GRAMMAR_COMPILING = "grammar_compiling"


class ChunkReason(StrEnum):
    WHOLE = "whole"
    BUDGET = "budget"
    LONG_PROMPT = "long_prompt"
    REST = "rest"


class PreemptReason(StrEnum):
    """Why a running request gave its place up.

    A running one could not grow; a waiting one of a better class or of a tenant served less was owed it; it only filled
    idle time, the time is not idle any more, and others need its slot, its blocks or what it was about to compute.
    """

    NO_BLOCKS = "no_blocks"
    OWED = "owed"
    YIELD = "yield"


class EvictReason(StrEnum):
    ALLOCATION = "allocation"
    RESET = "reset"
    UNRANKED = "unranked"
    """The eviction policy failed to rank it, so it went first."""


class Scope(StrEnum):
    """To whom a cache's promise is made and kept: to a tenant, and in each of its partitions."""

    TENANT = "tenant"
    PARTITION = "partition"


class Lookup(StrEnum):
    """How asking a response cache ended."""

    HIT = "hit"
    MISS = "miss"
    BYPASS = "bypass"


class Fault(StrEnum):
    """What was wrong with a store of answers."""

    SLOW = "slow"
    DAMAGED = "damaged"
    FAILED = "failed"
    RESTING = "resting"


class MoveReason(StrEnum):
    """Why a block's content was copied to another tier.

    Down: evicted from the device; worth keeping on disk; saved when the engine ends. Up: fetched from the disk for a
    request that waits; restored for one that starts.
    """

    EVICTED = "evicted"
    KEPT = "kept"
    SAVED = "saved"
    FETCHED = "fetched"
    RESTORED = "restored"


class DeclineReason(StrEnum):
    """Why what lies in a lower tier was not fetched."""

    QUICKER_TO_COMPUTE = "quicker_to_compute"


class TurnedAway(NamedTuple):
    """A request was turned away at the gate, before any engine heard of it; its `Finished` follows."""

    request_id: str
    tenant: str
    service_class: str
    reason: RejectReason


class Arrived(NamedTuple):
    request_id: str
    prompt_tokens: int
    tenant: str
    priority: int
    at: float | None = None
    service_class: str = "default"
    slo: Slo = NO_SLO


def arrival(request: Request) -> Arrived:
    """That ``request`` came."""
    return Arrived(
        request.id,
        len(request.tokens),
        request.tenant,
        request.priority,
        request.arrived,
        request.service_class,
        request.slo,
    )


class Admitted(NamedTuple):
    """A request got a slot; ``cached_tokens`` of its known tokens need no computing."""

    request_id: str
    reason: AdmitReason
    cached_tokens: int
    known_tokens: int
    at: float | None = None


class Skipped(NamedTuple):
    """Told when the reason is new for this request, not at every step that it lasts."""

    request_id: str
    reason: SkipReason


class Chunked(NamedTuple):
    """A row of prefill: positions ``[start, start + length)`` were planned, and why just so many."""

    request_id: str
    start: int
    length: int
    reason: ChunkReason


class Emitted(NamedTuple):
    """Tokens of an answer, final: they are never taken back."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptScored(NamedTuple):
    """Log-probabilities of prompt tokens ``start + 1 ...``, for requests that asked for them."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


class Preempted(NamedTuple):
    """A running request gave its blocks back and waits again; ``lost_tokens`` may need recomputing."""

    request_id: str
    reason: PreemptReason
    lost_tokens: int


class Evicted(NamedTuple):
    """Cached blocks lost their content, in this order."""

    blocks: tuple[int, ...]
    reason: EvictReason


class Moved(NamedTuple):
    """Blocks are copied from tier to tier: begun, where the disk takes part. ``request_id`` where it is for one."""

    source: Tier
    target: Tier
    blocks: int
    bytes: int
    reason: MoveReason
    request_id: str = ""


class TransferFailed(NamedTuple):
    """A copy to or from the disk has failed: the disk could not be written, or did not hold what it should. Or one
    down has not begun, because the policy that should say whether it pays has failed."""

    source: Tier
    target: Tier


class RestoreDeclined(NamedTuple):
    """A request computes tokens that lie in a lower tier."""

    request_id: str
    tokens: int
    reason: DeclineReason = DeclineReason.QUICKER_TO_COMPUTE


class Finished(NamedTuple):
    """The one end of a request. ``message`` says more where the reason is rejected or failed."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    message: str = ""
    stop_token: int | None = None


class Stepped(NamedTuple):
    """Sizes of one committed step and of the engine after it."""

    step: int
    decode_rows: int
    prefill_rows: int
    computed_tokens: int
    running: int
    waiting: int
    blocks_held: int
    blocks_total: int
    slots_allocated: int
    slots_filled: int


class LookedUp(NamedTuple):
    """A response cache was asked for a request, or was not (``BYPASS``), and why it ended so."""

    request_id: str
    layer: Layer
    outcome: Lookup
    seconds: float
    reason: str = ""


class Spared(NamedTuple):
    """A request was answered with tokens that had been computed before, or were being computed for another."""

    request_id: str
    tenant: str
    layer: Layer
    prompt_tokens: int
    output_tokens: int
    age_seconds: float


class Audited(NamedTuple):
    """A request was computed although a cache had an answer; whether that answer was ``right``.

    ``refuted`` says where just this audit, with those before it, refutes what is promised of such answers.
    """

    request_id: str
    layer: Layer
    right: bool
    refuted: Scope | None = None


class StoreFaulted(NamedTuple):
    """A store of answers could not be used; for the request it was a miss."""

    store: str
    fault: Fault
    message: str = ""


Event = (
    TurnedAway
    | Arrived
    | Admitted
    | Skipped
    | Chunked
    | Emitted
    | PromptScored
    | Preempted
    | Evicted
    | Moved
    | TransferFailed
    | RestoreDeclined
    | Finished
    | Stepped
    | LookedUp
    | Spared
    | Audited
    | StoreFaulted
)
