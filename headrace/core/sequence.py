"""A sequence: a request and its progress while it is in an engine.

Positions of a sequence, left to right:

```
 0 ........ computed ....... planned ....... len(tokens) ... known
   confirmed keys            in flight       still to plan   drawn on the device, not collected yet (pending)
   and values
```
``planned`` is ahead of ``computed`` by the positions that have been launched. ``known`` is ahead of ``tokens`` by the
tokens that launched rows will sample. Both pairs are equal when nothing is in flight. One rule makes all rows:
compute from ``planned`` towards ``known``. A prompt, a chunk, a decode step and a resumed sequence differ in nothing
else.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.events import Finished, PromptScored, SkipReason
from headrace.core.images import contents
from headrace.core.peers import Inquiry
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request

if TYPE_CHECKING:
    from headrace.core.tenancy.fair_share import TenantAccount

Rank = tuple[float, ...]
"""A position in an order: lower goes first; the arrival number breaks ties."""


class Status(StrEnum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """The changing state of one request; only the scheduler changes it."""

    __slots__ = (
        "accepted",
        "account",
        "ahead",
        "announced",
        "announced_cuts",
        "awaited_key",
        "batch_rank",
        "cached_tokens",
        "computed",
        "contents",
        "cuts",
        "end_tokens",
        "epoch",
        "finish_length",
        "inquiry",
        "keys",
        "last_step",
        "late",
        "latest_start",
        "look_up_at",
        "losses",
        "next_draft_step",
        "overtakes",
        "passes",
        "pending",
        "planned",
        "predicted_length",
        "preemptions",
        "prompt_seconds",
        "prompt_tokens",
        "rank",
        "registered",
        "request",
        "restore_by",
        "rolling",
        "root",
        "scored",
        "skip_reason",
        "skips",
        "slot",
        "started",
        "status",
        "table",
        "tokens",
        "tpot_seconds",
        "unconfirmed",
        "wanted",
        "window_end",
        "window_first",
    )

    account: TenantAccount  # the account that its rows are charged to; set by the queue

    def __init__(self, request: Request, rank: Rank, max_model_len: int) -> None:
        self.request = request
        self.rank = rank
        self.batch_rank = rank  # order among running sequences: the lowest gets blocks first
        self.tpot_seconds = math.inf  # its TPOT target
        self.predicted_length = 0  # predicted final length
        self.started = math.nan  # when it was first admitted
        self.prompt_seconds = 0.0  # predicted prefill time when it runs alone
        self.latest_start = math.inf  # the latest start that meets its TTFT target
        self.late = False  # it cannot meet its TTFT target, or was deferred so that others can
        self.passes = 0  # how often a pick policy let another sequence start first
        self.overtakes: Sequence | None = None  # the sequence that this one would pass by starting now
        self.preemptions = 0
        self.losses = 0  # how often its keys and values were lost while it ran
        self.tokens = [*request.tokens, *request.answered]
        # What stands at each position, for keys and comparisons; without images, the tokens themselves.
        self.contents = [*contents(self.tokens, request.images)] if request.images else self.tokens
        self.prompt_tokens = len(request.tokens)
        asked = request.params.max_tokens
        self.finish_length = (
            max_model_len if asked is None else min(self.prompt_tokens + asked, max_model_len)
        )
        params = request.params
        self.end_tokens = frozenset(params.stop_token_ids)  # tokens that end the answer
        if not params.ignore_eos:
            self.end_tokens |= request.eos_token_ids
        self.status = Status.WAITING
        self.slot = -1
        self.table: list[int] = []
        self.window_first = self.window_end = 0  # the places of its table that have parts of window groups
        self.computed = 0
        self.planned = 0
        self.pending = 0
        self.ahead = (
            0  # positions behind `planned` that its last row computed, and that its state has not passed
        )
        self.epoch = 0  # grows at preemption and finish, which makes launched rows stale
        self.accepted = 0  # drafted tokens of its output
        self.next_draft_step = 0  # the first step at which it is drafted for
        self.last_step = -1  # the last step that had a row of this sequence
        self.root = root_key(request.salt, request.adapter)
        self.keys: list[bytes] = []  # chained keys of the full blocks of `tokens`, computed on demand
        self.registered = 0  # full blocks of the table that are in the prefix cache
        self.announced = 0  # full blocks of the prompt that it announced to compute
        self.wanted = 0  # full blocks that the pool should retain while it waits
        self.restore_by = math.inf  # how long it waits for blocks from disk and peers
        self.look_up_at = -math.inf  # while it waits for them, when it is looked up in any case
        self.inquiry: Inquiry | None = None  # what peers were asked for it while it waits
        self.awaited_key = b""  # of the first block that its last lookup missed
        self.cuts: list[int] = []  # positions before it at which its state is saved
        self.announced_cuts: list[int] = []  # those whose checkpoints other requests may wait for
        self.unconfirmed: list[tuple[int, int]] = []  # positions saved ahead of their commit, and cells
        self.rolling = b""  # the key of the last checkpoint of its output
        self.cached_tokens = 0  # prompt tokens found in the cache at first admission, as reported in usage
        self.scored = 0  # prompt positions whose log-probabilities have been emitted
        self.skips = 0
        self.skip_reason: SkipReason | None = None

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens of its output per step that drew some; 1 without accepted drafts."""
        steps = self.output_tokens - self.accepted
        return self.output_tokens / steps if self.accepted and steps > 0 else 1.0

    def enter(self, status: Status) -> None:
        """Change the status along `TRANSITIONS`.

        Raises:
            ValueError: there is no such transition.
        """
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"request {self.request.id} cannot go from {self.status} to {status}")
        self.status = status

    def full_keys(self, block_size: int) -> list[bytes]:
        """Chained keys of all full blocks of the confirmed tokens, and of images among them."""
        done = len(self.keys) * block_size
        if len(self.contents) >= done + block_size:
            parent = self.keys[-1] if self.keys else self.root
            self.keys += chained_keys(parent, self.contents[done:], block_size)
        return self.keys

    def extend(self, drawn: tuple[int, ...]) -> None:
        """Append sampled tokens."""
        self.tokens += drawn
        if self.contents is not self.tokens:
            self.contents += drawn

    def finish_reason(self) -> FinishReason | None:
        """Whether the last confirmed token ended the answer, and why."""
        if self.tokens[-1] in self.end_tokens:
            return FinishReason.STOP
        if len(self.tokens) >= self.finish_length:
            return FinishReason.LENGTH
        return None

    def prompt_scores(self, start: int, scores: tuple[TokenLogprob, ...]) -> PromptScored | None:
        """The event of the scores that are new: each is reported once, though a preempted prompt is computed again."""
        new = scores[max(0, self.scored - start) :]
        if not new:
            return None
        self.scored = start + len(scores)
        return PromptScored(self.request.id, self.scored - len(new), new)

    def stop_token(self, reason: FinishReason) -> int | None:
        """The token that ended the answer, if one did."""
        return self.tokens[-1] if reason is FinishReason.STOP else None

    def ended(self, reason: FinishReason, message: str = "", stop_token: int | None = None) -> Finished:
        """The `Finished` event of this sequence."""
        return Finished(
            self.request.id,
            reason,
            self.prompt_tokens,
            self.output_tokens,
            self.cached_tokens,
            message,
            stop_token,
        )
