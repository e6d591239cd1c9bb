"""Events: everything that happens in the engine and the caches, emitted once, each with its reason.

Metrics, explanations, traces, the dashboard and tests are folds over this one stream. A fold receives ``now`` with
each event (see `core.ports.Watcher`): the end of the step that emitted it. Two events happen before the work of that
step and carry their own time in ``at`` (None: the time of emission).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from headrace.core.embedding import Embedded, EmbeddingSlice
from headrace.core.peers import PeersAnswered, Pulled
from headrace.core.plan import Row, Tier, TokenLogprob
from headrace.core.request import NO_SLO, FinishReason, RejectReason, Request, Slo
from headrace.core.sleep import SleepChanged


class Layer(StrEnum):
    """The cache layer that saved the computation."""

    EXACT = "exact"
    SEMANTIC = "semantic"
    PREFIX = "prefix"
    PARTIAL = "partial"
    COALESCED = "coalesced"


class AdmitReason(StrEnum):
    NEW = "new"
    RESUMED = "resumed"


class SkipReason(StrEnum):
    """Why a waiting request was not admitted in a step, or why running background work is paused."""

    NO_SLOT = "no_slot"
    NO_BLOCKS = "no_blocks"
    NO_BUDGET = "no_budget"
    BATCH_NOT_READY = "batch_not_ready"
    PREFIX_IN_FLIGHT = "prefix_in_flight"
    STEP_FULL = "step_full"
    RESTORING = "restoring"
    NOT_IDLE = "not_idle"
    GRAMMAR_COMPILING = "grammar_compiling"
    ADAPTER_LOADING = "adapter_loading"
    NO_ADAPTER_PLACE = "no_adapter_place"
    ASKING_PEERS = "asking_peers"
    KV_LIMIT = "kv_limit"


class ChunkReason(StrEnum):
    WHOLE = "whole"
    BUDGET = "budget"
    LONG_PROMPT = "long_prompt"
    REST = "rest"
    CHECKPOINT = "checkpoint"
    NO_BLOCKS = "no_blocks"


class RecomputeReason(StrEnum):
    """Why cached tokens of a model with recurrent states are computed again.

    ``no_checkpoint``: no state was saved within them. ``beyond``: they follow the last saved state. ``evicted``: a
    state within them was saved, and evicted.
    """

    NO_CHECKPOINT = "no_checkpoint"
    BEYOND = "beyond"
    EVICTED = "evicted"


class DropReason(StrEnum):
    """Why a checkpoint of recurrent states was dropped.

    ``evicted``: another checkpoint needed its memory. ``superseded``: its request has a later one. ``block``: the block
    of keys and values that ends there was evicted or reset.
    """

    EVICTED = "evicted"
    SUPERSEDED = "superseded"
    BLOCK = "block"


class PreemptReason(StrEnum):
    """Why a running request was preempted.

    ``no_blocks``: a running request needed a block. ``owed``: a waiting request of a better class, or of a tenant
    that has received less service, was owed its slot or blocks. ``yield``: it was background work, and other requests
    need its slot, its blocks or the prefix that it was about to compute. ``sleep``: the model was put to sleep, and the
    request continues when it wakes up. ``lost``: the memory of the engine was lost, with a rank or with the engine's
    process.
    """

    NO_BLOCKS = "no_blocks"
    OWED = "owed"
    YIELD = "yield"
    SLEEP = "sleep"
    LOST = "lost"


class LostPart(StrEnum):
    """What took the memory of the engine with it."""

    RANK = "rank"
    PROCESS = "process"


class EvictReason(StrEnum):
    ALLOCATION = "allocation"
    RESET = "reset"
    UNRANKED = "unranked"
    """The eviction policy failed to rank the block, so it was evicted first."""


class Scope(StrEnum):
    """The scope of an error bound of the semantic cache: a tenant, or one of its partitions."""

    TENANT = "tenant"
    PARTITION = "partition"


class Lookup(StrEnum):
    """The result of a response cache lookup."""

    HIT = "hit"
    MISS = "miss"
    BYPASS = "bypass"


class Fault(StrEnum):
    """What was wrong with a response store."""

    SLOW = "slow"
    DAMAGED = "damaged"
    FAILED = "failed"
    RESTING = "resting"
    TOO_LARGE = "too_large"


class MoveReason(StrEnum):
    """Why a block's content was copied to another tier.

    Down: evicted from the device; worth storing on disk; saved when the engine ends. Up: fetched from the disk for a
    waiting request; restored for one that starts. From peers, blocks are fetched too.
    """

    EVICTED = "evicted"
    KEPT = "kept"
    SAVED = "saved"
    FETCHED = "fetched"
    RESTORED = "restored"


class DeclineReason(StrEnum):
    """Why content of a lower tier was not fetched."""

    QUICKER_TO_COMPUTE = "quicker_to_compute"


class TurnedAway(NamedTuple):
    """A request was rejected at admission, before it reached an engine; its `Finished` follows."""

    request_id: str
    tenant: str
    service_class: str
    reason: RejectReason
    slo: Slo = NO_SLO


class Arrived(NamedTuple):
    request_id: str
    prompt_tokens: int
    tenant: str
    priority: int
    at: float | None = None
    service_class: str = "default"
    slo: Slo = NO_SLO
    adapter: str = ""
    images: tuple[int, ...] = ()
    """The positions of the prompt that each of its images takes."""


def arrival(request: Request) -> Arrived:
    """The `Arrived` event of a request."""
    return Arrived(
        request.id,
        len(request.tokens),
        request.tenant,
        request.priority,
        request.arrived,
        request.service_class,
        request.slo,
        request.adapter,
        tuple([span.length for span in request.images]),
    )


class Admitted(NamedTuple):
    """A request got a slot; ``cached_tokens`` of its known tokens need no computing."""

    request_id: str
    reason: AdmitReason
    cached_tokens: int
    known_tokens: int
    at: float | None = None


class Skipped(NamedTuple):
    """A request was passed over. Emitted when its reason changes, not at every step."""

    request_id: str
    reason: SkipReason


class Chunked(NamedTuple):
    """A prefill row was planned: positions ``[start, start + length)``, and what bounded the length."""

    request_id: str
    start: int
    length: int
    reason: ChunkReason


class Emitted(NamedTuple):
    """Tokens of an answer, final: they are never taken back."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Verified(NamedTuple):
    """Drafts of a row were verified: ``accepted`` of ``drafted`` tokens from ``source``. `Emitted` has the tokens.

    ``expected`` of them were estimated to be accepted. ``cut`` says why no more were verified, if the drafter says it.
    """

    request_id: str
    source: str
    drafted: int
    accepted: int
    expected: float = 0.0
    cut: str = ""


class DraftDeclined(NamedTuple):
    """Tokens were proposed for a request, but none are verified, and why. Emitted when the reason changes."""

    request_id: str
    source: str
    cut: str


class DraftedStep(NamedTuple):
    """A step with drafts: what it gained, in predicted seconds.

    ``seconds`` are predicted for the step, ``without`` for the same tokens in steps without drafts, and ``expected``
    for the tokens that it was estimated to yield.
    """

    seconds: float
    without: float
    expected: float


class DraftingFailed(NamedTuple):
    """The drafter raised an exception. Drafting is off from now on; requests continue without it."""

    message: str


class PromptScored(NamedTuple):
    """Log-probabilities of prompt tokens ``start + 1 ...``, for requests that asked for them."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


class Preempted(NamedTuple):
    """A running request lost its blocks and waits again; ``lost_tokens`` may need recomputing."""

    request_id: str
    reason: PreemptReason
    lost_tokens: int


class EngineLost(NamedTuple):
    """The keys and values of all requests were lost, and why. ``recomputed`` running requests wait to be computed
    again, ``failed`` ones end.
    """

    part: LostPart
    message: str
    recomputed: int
    failed: int


class Evicted(NamedTuple):
    """Cached blocks lost their content, in this order."""

    blocks: tuple[int, ...]
    reason: EvictReason


class Moved(NamedTuple):
    """Blocks were copied between tiers, for a request if it is named; of disk and peers, the copy has started."""

    source: Tier
    target: Tier
    blocks: int
    bytes: int
    reason: MoveReason
    request_id: str = ""


class TransferFailed(NamedTuple):
    """A copy to or from the disk has failed, or one down did not start because the policy that judges it failed."""

    source: Tier
    target: Tier


class RestoreDeclined(NamedTuple):
    """A request computes tokens that a lower tier holds."""

    request_id: str
    tokens: int
    reason: DeclineReason = DeclineReason.QUICKER_TO_COMPUTE


class Recomputed(NamedTuple):
    """A request computes tokens again whose keys and values are cached, because no recurrent state is saved there."""

    request_id: str
    tokens: int
    reason: RecomputeReason


class Checkpointed(NamedTuple):
    """The recurrent state of a request behind its first ``tokens`` tokens was saved. Without a request, it is that of
    an earlier process, read at start.
    """

    request_id: str
    tokens: int


class StateRestored(NamedTuple):
    """A request starts from a checkpoint: the recurrent state behind its first ``tokens`` tokens was restored."""

    request_id: str
    tokens: int


class CheckpointDropped(NamedTuple):
    """A checkpoint of recurrent states was dropped."""

    reason: DropReason


class Finished(NamedTuple):
    """The single end of a request. ``message`` gives details if the reason is rejected or failed."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    message: str = ""
    stop_token: int | None = None


class StepRows(NamedTuple):
    """The rows of a step in the order of its plan, the requests they belong to, and the time of planning.

    Every row of the plan is here, also one that failed or whose request has ended meanwhile: it has been computed.
    ``drafting`` is the time, within the step's, that draft models took for each row; empty if none.
    """

    began: float
    request_ids: tuple[str, ...]
    rows: tuple[Row, ...]
    drafting: tuple[float, ...] = ()


NO_ROWS = StepRows(0.0, (), ())


class Stepped(NamedTuple):
    """The size of a committed step, and of the engine after it; ``work`` is what it computed."""

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
    work: StepRows = NO_ROWS


class LookedUp(NamedTuple):
    """A response cache was looked up for a request, or was bypassed (``BYPASS``), with the result and its reason.

    The reason of a hit is the certificate that it was served by, if it has one.
    """

    request_id: str
    layer: Layer
    outcome: Lookup
    seconds: float
    reason: str = ""


class Spared(NamedTuple):
    """A request was served with tokens computed earlier, or being computed for another request."""

    request_id: str
    tenant: str
    layer: Layer
    prompt_tokens: int
    output_tokens: int
    age_seconds: float


class Audited(NamedTuple):
    """A request was computed although a cache had a response, to check that response: ``right`` or not.

    ``refuted`` names the scope whose error bound this audit, together with earlier ones, shows to be exceeded.
    """

    request_id: str
    layer: Layer
    right: bool
    refuted: Scope | None = None


class StoreFaulted(NamedTuple):
    """A response store could not be used; the request counts as a miss."""

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
    | Verified
    | DraftDeclined
    | DraftedStep
    | DraftingFailed
    | PromptScored
    | Preempted
    | EngineLost
    | Evicted
    | Moved
    | TransferFailed
    | PeersAnswered
    | Pulled
    | RestoreDeclined
    | Recomputed
    | Checkpointed
    | StateRestored
    | CheckpointDropped
    | Finished
    | Stepped
    | LookedUp
    | Spared
    | Audited
    | SleepChanged
    | Embedded
    | EmbeddingSlice
    | StoreFaulted
)
