"""A runner without a model: its "keys and values" are rolling hashes of the prefix.

Position p stores hash(hash at p-1, token at p) in the block and offset that the block table names. A token is sampled
from all hashes of the prefix, read back through the table. So a stale block, a wrong offset, a missing copy or another
request's row changes the output, and `expected_tokens` returns the right one.

With ``checkpoints`` the model has recurrent states: the hash of the last position that is not ahead is also the state
of its slot, and the next row continues from there instead of reading it from a block. So a state of another position or
sequence changes the output, too. Moves save states in cells and restore them.

With ``windows`` there are groups of window layers, too: see `attended`. So a block of a group that was given back too
early, or found where it is not, changes the output.

A request at temperature 0 samples as with seed 0. A constraint is a grammar over output tokens (`permitted`): it allows
a third of the vocabulary, or ends the output.

`LyingDrafter` is a faulty drafter for such a runner: some of its drafts are right, others are wrong, too long,
impossible, or continue after the end. Drafts must not change outputs, so an engine with it must output the same as
without drafts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.images import ImageSpan, contents
from headrace.core.memory.checkpoints import Checkpoints
from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.core.plan import Arrival, Move, Row, StepOutput, StepPlan, Tier
from headrace.core.request import Request, SamplingParams

Truth = Callable[[DraftRow, int], Sequence[int]]
"""Returns the right tokens after those of an ask, as far as they are known, and at most the given number."""

MOST = 8
IMPOSSIBLE = (-1, -2, -3, 1 << 40)
"""Token ids that no vocabulary has."""


def hashed_truth(draft_row: DraftRow, count: int, windows: WindowGroups = NO_WINDOWS) -> Sequence[int]:
    """The next tokens of a `HashingRunner`, ignoring the end of the output."""
    request, params = draft_row.request, draft_row.request.params
    done = len(draft_row.tokens) - len(request.tokens)
    seed, grammar = seed_of(params, request.seed), grammar_of(params)
    prompt = seen(request.tokens, request.images)
    return expected_tokens(prompt, seed, done + count, frozenset(), grammar, windows)[done:]


class LyingDrafter:
    """A `core.drafting.proposal.Drafter` that proposes the ``truth`` at random times, chosen by ``seed``.

    ``drafted`` and ``accepted`` count the verified tokens. It raises at the ``fails``-th ask. It reports
    ``draft_seconds`` for each ask of a step.
    """

    idle = False

    def __init__(
        self, truth: Truth, seed: int, vocab_size: int, fails: int | None = None, draft_seconds: float = 0.0
    ) -> None:
        self.drafted = 0
        self.accepted = 0
        self.ends: list[str] = []
        self.seconds: dict[str, float] = {}
        self._truth = truth
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._left = fails
        self._draft_seconds = draft_seconds

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`; a proposal may be longer than asked for."""
        if self._left is not None:
            self._left -= len(draft_rows)
            if self._left <= 0:
                raise RuntimeError("the drafter is out of order")
        assert all(draft_row.max_tokens > 0 for draft_row in draft_rows), (
            "the drafter was asked for a draft of no tokens"
        )
        self.seconds = (
            {draft_row.request.id: self._draft_seconds for draft_row in draft_rows}
            if self._draft_seconds
            else {}
        )
        return [self._propose(draft_row) for draft_row in draft_rows]

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        rng, way = self._rng, self._rng.random()
        if way < 0.15:
            return None
        if way < 0.3:
            tokens = [rng.randrange(self._vocab_size) for _ in range(rng.randint(0, MOST))]
        else:
            tokens = list(
                self._truth(draft_row, rng.randint(1, MOST if way < 0.85 else draft_row.max_tokens + MOST))
            )
        if 0.4 < way < 0.65 and tokens:  # one wrong token among right ones
            tokens[rng.randrange(len(tokens))] = rng.randrange(self._vocab_size)
        elif 0.65 < way < 0.7 and tokens:
            tokens[rng.randrange(len(tokens))] = rng.choice(IMPOSSIBLE)
        return Proposal(tuple(tokens), (0.5,) * len(tokens), "lies")

    def next_draft_step(self, request: Request) -> int:
        """See `Drafter.next_draft_step`: it may be asked at every step."""
        return 0

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """See `Drafter.observed`."""
        assert 0 < rows <= drawn

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        assert 0 <= accepted <= len(proposal.tokens) == len(proposal.confidences)
        self.drafted += len(proposal.tokens)
        self.accepted += accepted

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self.ends.append(request.id)


VOCAB = 97
GRAMMAR_END = 7
"""The only token that a grammar allows where the output must end."""
MASK = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    """One step of a 64-bit rolling hash."""
    state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ state >> 29


def attended(group: int, before: Iterable[int], token: int) -> int:
    """What a group of window layers stores for a token, after what it stored ``before`` within the window.

    The hash of the prefix takes in the values of all groups.
    """
    value = group + 1
    for each in before:
        value = mix(value, each)
    return mix(value, token)


def seen(tokens: Sequence[int], images: Iterable[ImageSpan]) -> tuple[int, ...]:
    """What the runner computes with at each position: a token, or what an image's features, a number, have there."""
    found = list(tokens)
    for span in images:
        found[span.start : span.end] = [mix(span.features, offset) for offset in range(span.length)]
    return tuple(found)


def permitted(grammar: str, output: Iterable[int]) -> Sequence[int]:
    """The tokens that a grammar, named by its source, allows after an output; all of them if the name is empty."""
    if not grammar:
        return range(VOCAB)
    state = 1
    for value in (*grammar.encode(), *output):
        state = mix(state, value)
    return (GRAMMAR_END,) if state % 13 == 0 else range(state % 3, VOCAB, 3)


def draw(hashes: list[int], seed: int, tokens: Sequence[int] = range(VOCAB)) -> int:
    """The token among ``tokens`` that follows a prefix with these hashes."""
    total = seed
    for value in hashes:
        total = mix(total, value)
    return tokens[total % len(tokens)]


def seed_of(params: SamplingParams, seed: int) -> int:
    """The seed that a request samples with."""
    return seed if params.temperature else 0


def grammar_of(params: SamplingParams) -> str:
    """The grammar of a request; empty for none."""
    return params.structured_outputs.source if params.structured_outputs else ""


def expected_tokens(
    prompt: tuple[int, ...],
    seed: int,
    count: int,
    stop: frozenset[int],
    grammar: str = "",
    windows: WindowGroups = NO_WINDOWS,
) -> list[int]:
    """The right output of a request whose prompt was `seen`, computed without blocks, rows or steps."""
    hashes: list[int] = []
    values: list[list[int]] = [[] for _ in range(windows.groups)]

    def add(token: int) -> None:
        state = mix(hashes[-1] if hashes else 0, token)
        for group, stored in enumerate(values):
            first = max(0, len(stored) + 1 - windows.tokens)
            stored.append(attended(group, stored[first:], token))
            state = mix(state, stored[-1])
        hashes.append(state)

    for token in prompt:
        add(token)
    answer: list[int] = []
    while len(answer) < count:
        token = draw(hashes, seed, permitted(grammar, answer))
        answer.append(token)
        if token in stop:
            break
        add(token)
    return answer


class HashingRunner:
    """A `core.ports.Runner` over hashed pages.

    Requests named in ``poison`` fail at their next row. A copy to or from disk or peers ends ``disk_steps`` launches
    after it began; ``breaks`` decides which copies fail, ``interrupts`` which background steps are interrupted.
    ``checkpoints`` are those of a model with recurrent states, ``windows`` the groups of window layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        *,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        peer_blocks: int = 0,
        disk_steps: int = 2,
        checkpoints: Checkpoints | None = None,
        windows: WindowGroups = NO_WINDOWS,
    ) -> None:
        self.block_size = block_size
        self.pages = [[0] * block_size for _ in range(num_blocks)]
        self.states = None if checkpoints is None else [-1] * max_num_seqs
        self.cells = [-1] * (0 if checkpoints is None else checkpoints.num_cells)
        self.tiers = {
            Tier.DEVICE: self.pages,
            Tier.HOST: [[0] * block_size for _ in range(host_blocks)],
            Tier.DISK: [[0] * block_size for _ in range(disk_blocks)],
            Tier.PEER: [[0] * block_size for _ in range(peer_blocks)],
        }
        self.disk_steps = disk_steps
        self.breaks: Callable[[Move], bool] = lambda move: False
        self.interrupts: Callable[[StepPlan], bool] = lambda plan: False
        self._transfers: deque[tuple[int, Move]] = deque()
        self._launches = 0
        self.tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.windows = windows
        self.parts: list[dict[int, tuple[int, ...]]] = [{} for _ in range(max_num_seqs)]  # by place
        self.owners = [""] * max_num_seqs
        self.seeds = [0] * max_num_seqs
        self.prompts = [0] * max_num_seqs
        self.grammars = [""] * max_num_seqs
        self.poison: set[str] = set()
        self.computed_tokens = 0
        self._outputs: deque[StepOutput] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            self.tokens[entry.slot] = [*seen(entry.tokens, entry.images)]
            self.tables[entry.slot] = list(entry.blocks)
            self.owners[entry.slot] = entry.request_id
            self.seeds[entry.slot] = seed_of(entry.params, entry.seed)
            self.prompts[entry.slot] = entry.prompt_tokens
            self.grammars[entry.slot] = grammar_of(entry.params)
        assert plan.has_work, "a plan without work"
        self._launches += 1
        for move in plan.moves:
            self._move(move)
        for slot, place, parts in plan.placed:
            assert all(len(part) == self.windows.groups for part in parts), (
                "a part has not one block of each group"
            )
            self.parts[slot].update(enumerate(parts, place))
        self._check_apart(plan)
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of one slot"
        if plan.idle and plan.rows and self.interrupts(plan):
            self._break_off(plan)
            return
        drawn: list[tuple[int, ...]] = []
        failures: dict[int, str] = {}
        size = self.block_size
        for i, row in enumerate(plan.rows):
            self.computed_tokens += row.length
            table = self.tables[row.slot]
            table += row.new_blocks
            known = self.tokens[row.slot]
            end = row.start + row.length
            first = end - len(row.drafts)
            assert first <= len(known), "a row reaches past what is known"
            assert row.samples == (first == len(known)), "a row samples in the middle"
            assert row.samples or not row.drafts, "a row drafts in the middle"
            assert end <= len(table) * size, "a row has no block"
            if self.owners[row.slot] in self.poison:
                failures[i] = "poisoned"
                drawn.append(())
                if self.states is not None:
                    self.states[row.slot] = -1
                known += [0] * row.samples  # its next row may be in flight already
                continue
            state = self._before(row)
            kept = end - plan.ahead.get(i, 0)
            assert self.states is None or row.start < kept <= first, "a state passes a draft, or stands still"
            for position, token in enumerate([*known[row.start : first], *row.drafts], row.start):
                state = self._attend(row.slot, position, token, mix(state, token))
                self.pages[table[position // size]][position % size] = state
                if self.states is not None and position < kept:
                    self.states[row.slot] = state
            drawn.append(self._draw(row, first) if row.samples else ())
            known += drawn[-1]
        arrivals = self._arrivals()
        assert arrivals or not plan.waits or self._transfers, "the plan waits, but no copy is running"
        self._outputs.append(StepOutput(plan.step, tuple(drawn), failures=failures, arrivals=arrivals))

    def _attend(self, slot: int, position: int, token: int, state: int) -> int:
        """Store the values of all window groups at a position; the hash with them."""
        size, parts = self.block_size, self.parts[slot]
        first = max(0, position + 1 - self.windows.tokens)
        for group in range(self.windows.groups):
            before = [self.pages[parts[p // size][group]][p % size] for p in range(first, position)]
            value = attended(group, before, token)
            self.pages[parts[position // size][group]][position % size] = value
            state = mix(state, value)
        return state

    def _check_apart(self, plan: StepPlan) -> None:
        """No row writes to a block of a window group that another row of the plan reads or writes."""
        written: dict[int, int] = {}
        size = self.block_size
        spans = [(row.slot, row.start, row.start + row.length) for row in plan.rows if self.windows.groups]
        for slot, start, end in spans:
            for place in range(start // size, (end - 1) // size + 1):
                for block in self.parts[slot][place]:
                    assert written.setdefault(block, slot) == slot, "two rows write to one block"
        for slot, start, end in spans:
            for place in range(self.windows.first(start, size), (end - 1) // size + 1):
                for block in self.parts[slot][place]:
                    assert written.get(block, slot) == slot, "a row reads a block that another one writes"

    def _before(self, row: Row) -> int:
        """The hash before a row: the state of its slot, or else that of the position before."""
        if not row.start:
            return 0
        if self.states is not None:
            return self.states[row.slot]
        page, place = divmod(row.start - 1, self.block_size)
        return self.pages[self.tables[row.slot][page]][place]

    def _draw(self, row: Row, first: int) -> tuple[int, ...]:
        """The tokens from position ``first`` on: one, and another one after each draft token that equals it."""
        table, size = self.tables[row.slot], self.block_size
        hashes = [self.pages[table[p // size]][p % size] for p in range(row.start + row.length)]
        output, tokens = self.tokens[row.slot][self.prompts[row.slot] :], list[int]()
        for i, draft in enumerate((*row.drafts, None), first):
            allowed = permitted(self.grammars[row.slot], (*output, *tokens))
            tokens.append(draw(hashes[:i], self.seeds[row.slot], allowed))
            if tokens[-1] != draft:
                break
        return tuple(tokens)

    def _break_off(self, plan: StepPlan) -> None:
        """Leave invalid hashes where the rows would have been written."""
        for row in plan.rows:
            self.tables[row.slot] += row.new_blocks
            for position in range(row.start, row.start + row.length):
                page, place = divmod(position, self.block_size)
                for block in (self.tables[row.slot][page], *self.parts[row.slot].get(page, ())):
                    self.pages[block][place] = -1
        self._outputs.append(StepOutput(plan.step, (), arrivals=self._arrivals(), broken_off=True))

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def _move(self, move: Move) -> None:
        if move.source_tier.holds_states:
            assert self.states is not None, "a model without states"
            places = {Tier.SLOT: self.states, Tier.CHECKPOINT: self.cells}
            places[move.target_tier][move.target] = places[move.source_tier][move.source]
            return
        busy = {
            end
            for _, each in self._transfers
            for end in ((each.source_tier, each.source), (each.target_tier, each.target))
        }
        assert (move.target_tier, move.target) not in busy, "a block is written while it is copied"
        source = self.tiers[move.source_tier][move.source]
        if {Tier.DISK, Tier.PEER} & {move.source_tier, move.target_tier}:
            assert (move.source_tier, move.source) not in busy, "a block is copied twice at once"
            self.tiers[move.target_tier][move.target] = [
                -1
            ] * self.block_size  # invalid until the copy has arrived
            self._transfers.append((self._launches + self.disk_steps, move))
        else:
            self.tiers[move.target_tier][move.target] = list(source)

    def _arrivals(self) -> tuple[Arrival, ...]:
        arrivals = []
        while self._transfers and self._transfers[0][0] <= self._launches:
            _, move = self._transfers.popleft()
            broken = self.breaks(move)
            if not broken:
                self.tiers[move.target_tier][move.target] = list(self.tiers[move.source_tier][move.source])
            arrivals.append(Arrival(move, not broken, 0.001))
        return tuple(arrivals)


class HashingPeers:
    """`core.peers.Peers` for `HashingRunner`; an inquiry is answered after ``delay()`` calls of `tick`."""

    def __init__(self, delay: Callable[[], int] = lambda: 0) -> None:
        self.runner: HashingRunner | None = None
        self.asked: list[Inquiry] = []
        self.lost = False
        self._delay = delay
        self._pages: dict[bytes, list[int]] = {}
        self._waiting: deque[tuple[int, Inquiry]] = deque()
        self._ticks = 0

    def hold(
        self, tokens: Sequence[int], block_size: int, salt: str = "", images: Sequence[ImageSpan] = ()
    ) -> None:
        """Give the peers the blocks of this prompt."""
        state, states = 0, []
        for token in seen(tokens, images):
            state = mix(state, token)
            states.append(state)
        for i, key in enumerate(chained_keys(root_key(salt, ""), contents(tokens, images), block_size)):
            self._pages[key] = states[i * block_size : (i + 1) * block_size]

    def ask(self, inquiry: Inquiry) -> None:
        self.asked.append(inquiry)
        self._waiting.append((self._ticks + self._delay(), inquiry))
        self._answer()

    def assign(self, block: int, peer: str, key: bytes) -> None:
        if self.runner is not None:
            self.runner.tiers[Tier.PEER][block] = self._pages[key]

    def tick(self) -> None:
        """Advance time by one step, and answer the inquiries that are due."""
        self._ticks += 1
        self._answer()

    def answer_all(self) -> None:
        """Answer all inquiries at once from now on."""
        self._delay, self._ticks = (lambda: 0), self._ticks + 1_000_000
        self._answer()

    def _answer(self) -> None:
        for _ in range(len(self._waiting)):
            due, inquiry = self._waiting.popleft()
            if due > self._ticks:
                self._waiting.append((due, inquiry))
                continue
            keys = inquiry.keys
            held = next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))
            inquiry.answer = NO_OFFER if self.lost else Offer(inquiry.peer or "peer", held)
