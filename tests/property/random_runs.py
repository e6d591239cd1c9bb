"""One random life of the pure core: requests come, are cancelled, fail and expire over a tiny pool.

Most lives have a drafter that lies. `check_drafts_change_nothing` runs a life with it and without.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.core.capacity import NO_WINDOWS, WindowGroups, most_blocks
from headrace.core.constraint import Constraint, ConstraintKind
from headrace.core.engine import Engine
from headrace.core.events import Admitted, DraftingFailed, Finished, Preempted, SkipReason, Verified
from headrace.core.images import ImageSpan
from headrace.core.knobs import Knobs
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.plan import Tier
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import ENOUGH_STEPS, StepTimes
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue, single_queue
from headrace.core.queueing.order import ByPriority, FirstComeFirstServed, ShortestFirst
from headrace.core.request import NO_SLO, FinishReason, Request, Retention, SamplingParams, Slo
from headrace.core.scheduler.admission import Continuous, StaticBatch
from headrace.core.scheduler.running_set import MAX_PREEMPTIONS
from headrace.core.sequence import Sequence as Waiting
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.kv_limits import KvBounds
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import MakeCheckpoints, Record, drain, hashing_engine, make_checkpoints
from headrace.testing.hashing_runner import (
    VOCAB,
    HashingPeers,
    LyingDrafter,
    expected_tokens,
    grammar_of,
    hashed_truth,
    seed_of,
    seen,
)


class Fickle:
    """Restores now and then, some of what it could."""

    def choose(self, start: int, tiers: Sequence[Tier]) -> int:
        return (start + 5 * len(tiers)) % (len(tiers) + 1)

    def pays(self, tier: Tier, blocks: int) -> bool:
        return True

    def observe(self, tier: Tier, seconds: float) -> None:
        pass


class Compiling:
    """Holds some requests back, as if a grammar were being compiled, for some of the times that it is asked."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # its own, so that lives without it stay what they were
        self._left: dict[str, int] = {}

    def hold(self, request: Request) -> SkipReason | None:
        left = self._left.setdefault(request.id, self._rng.choice([0, 0, 0, 1, 5]))
        self._left[request.id] = left - 1
        return SkipReason.GRAMMAR_COMPILING if left > 0 else None


LONGEST = 64
BY_AGE = ShortestFirst(lambda each: 0.0, lambda: 0.0)
"""The most tokens of a prompt and its answer."""


class Chat:
    """A chat whose turns start at every residue of a chunk that a hit can have with these blocks.

    Each prompt ends at a block boundary that no hit has reached yet; the next one goes on from there. What is missed,
    for example because a request was cancelled, is tried again with a new text.
    """

    def __init__(self, seed: int, block_size: int, chunk: int) -> None:
        self._rng = random.Random(seed + 9)  # its own, like that of `Compiling`
        self._chunk = chunk
        self._ends = range(block_size, LONGEST - 1, block_size)
        self._text: tuple[int, ...] = ()
        self._length = 0

    @property
    def residues(self) -> set[int]:
        """All that a hit can have."""
        return {end % self._chunk for end in self._ends}

    def left(self, record: Record) -> set[int]:
        """Residues at which no request has started from a checkpoint."""
        starts = (event.cached_tokens for event in record.of(Admitted))
        return self.residues - {start % self._chunk for start in starts if start}

    def prompt(self, record: Record) -> tuple[int, ...]:
        """The next one."""
        left = self.left(record)
        ends = [end for end in self._ends if end % self._chunk in left]
        ahead = [end for end in ends if end > self._length]
        if self._length in ends and not ahead:
            length, self._length = min(self._length + self._rng.randint(1, 4), LONGEST - 1), 0
            return self._text[:length]
        if not self._length or not ahead:
            self._text = tuple(self._rng.randrange(VOCAB) for _ in range(LONGEST))
            ahead = ends
        self._length = self._rng.choice(ahead[:3]) if ahead else 0
        return self._text[: self._length or self._rng.randint(1, LONGEST - 1)]


QUEUES = [
    single_queue,
    lambda: FairQueue(ShareLedger(CLASSES, {"a": 3.0}), TenantQueue),
    lambda: FairQueue(ShareLedger(CLASSES, {}), TenantQueue),
]


def predictions(max_model_len: int) -> LatestStarts:
    """Predictions that have seen enough to be trusted."""
    seen = LatestStarts(StepTimes(), LengthPredictor(max_model_len), {each.name: each for each in CLASSES})
    for _ in range(ENOUGH_STEPS):
        seen.times.observe(1, 1, 1, 0.001)
    return seen


def _drafter(seed: int, groups: WindowGroups) -> LyingDrafter | None:
    rng = random.Random(seed + 2)  # its own, like that of `Compiling`
    if rng.random() < 0.4:
        return None
    truth = partial(hashed_truth, windows=groups) if groups.groups else hashed_truth
    return LyingDrafter(truth, seed, VOCAB, fails=rng.randint(1, 30) if rng.random() < 0.1 else None)


def _windows(seed: int, max_model_len: int) -> WindowGroups:
    rng = random.Random(seed + 8)  # its own, like that of `Compiling`
    return WindowGroups(rng.randint(1, 3), rng.randint(1, rng.choice([8, max_model_len])), rng.randint(1, 48))


def _peers(seed: int) -> HashingPeers | None:
    rng = random.Random(seed + 4)  # its own, like that of `Compiling`
    return HashingPeers(lambda: rng.choice([0, 0, 1, 5])) if rng.random() < 0.6 else None


def _knobs(rng: random.Random, groups: WindowGroups, max_model_len: int, chunk: int) -> Knobs:
    """Limits of a step; prompts are computed in chunks of ``chunk`` tokens, if that is given."""
    chunked = rng.random() < 0.8
    knobs = Knobs(
        batched_tokens=rng.randint(1, groups.chunk or 48) if chunked else max_model_len,
        chunked_prefill=chunked,
        long_prefill_tokens=rng.choice([0, 0, 3]),
        mixed_prefill_ratio=rng.choice([0.0, 0.5, 2.0]),
        max_skips=rng.randint(0, 4),
    )
    return (
        replace(knobs, batched_tokens=chunk, chunked_prefill=True, long_prefill_tokens=0) if chunk else knobs
    )


def _checkpoints(chats: random.Random, crowded: bool, least: int) -> MakeCheckpoints:
    cells = max(chats.choice([0, 1, 2, 4, 16, 64]), least)
    return make_checkpoints(chats.randint(1, 3) if crowded else cells, chats.choice([0, 3, 8]))


def _earlier(
    chats: random.Random, requests: dict[str, Request], record: Record, crowded: bool
) -> tuple[int, ...]:
    """The beginning of an earlier prompt, or all of it with some of its answer, which the next prompt continues."""
    before = chats.choice(list(requests.values()))
    if crowded and chats.random() < 0.6:
        return before.tokens[: chats.randint(1, len(before.tokens))]
    said = record.tokens.get(before.id, [])
    return (*before.tokens, *said[: chats.randint(0, len(said))])


def check_drafts_change_nothing(seed: int) -> int:
    """Run one life with its drafter and without, and compare the outputs; returns the number of accepted drafts.

    A request that was cancelled, failed or expired may end earlier in one of them.
    """
    drafted, plain = run(seed), run(seed, drafts=False)
    assert drafted.ends.keys() == plain.ends.keys()
    whole = (FinishReason.STOP, FinishReason.LENGTH)
    for name, (end,) in drafted.ends.items():
        (other,) = plain.ends[name]
        mine, yours = (record.tokens.get(name, []) for record in (drafted, plain))
        if end.reason in whole and other.reason in whole:
            assert (mine, _answer(end)) == (yours, _answer(other)), f"{name} differs with drafts"
        least = min(len(mine), len(yours))
        assert mine[:least] == yours[:least], f"{name} differs with drafts"
    return sum(each.accepted for each in drafted.of(Verified))


def _answer(end: Finished) -> Finished:
    """An end without what depends on the order of steps."""
    return end._replace(cached_tokens=0)


PLACEHOLDER = 90
"""The token that stands where an image does, and in some texts."""


def _with_images(
    tokens: tuple[int, ...], pictures: random.Random
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """A prompt in which up to two of three images stand, or their placeholders alone."""
    found, spans = list(tokens), []
    for start in (0, 2, 5, 13):
        length = pictures.choice([1, 3, 6, 10])
        if start + length > len(found) or pictures.random() < 0.4 or (spans and spans[-1].end > start):
            continue
        found[start : start + length] = [PLACEHOLDER] * length
        if pictures.random() < 0.8:
            picture = pictures.randrange(3)
            spans.append(ImageSpan(start, length, bytes([picture]) * 32, 1000 + picture))
    return tuple(found), tuple(spans)


def run(
    seed: int,
    *,
    drafts: bool = True,
    states: bool = False,
    windows: bool = False,
    images: bool = False,
    kv: KvBounds | None = None,
    hits: tuple[int, int] | None = None,
) -> Record:
    """Run one life and check every law of the core; the seed alone decides everything.

    Without ``drafts`` it is the same life, but nothing is drafted. With ``states`` the model keeps recurrent states,
    without peers, and some requests continue earlier ones as turns of a chat. Half of these lives are crowded: few
    checkpoints, and requests that are cancelled with a row in flight. With ``windows`` it has groups of window layers,
    without lower tiers, and turns of chats, too. Half of these lives have as little memory as one request may need.
    With ``images`` most prompts have some. ``kv`` bounds the memory of tenants and classes. With ``hits``, a block size
    and a chunk, most requests are turns of a `Chat` that starts at every residue.
    """
    rng = random.Random(seed)
    chats = random.Random(seed + 6)  # its own, like that of `Compiling`
    crowded = (states or windows) and chats.random() < 0.5
    block_size = rng.choice([1, 2, 4, 8])
    max_model_len = rng.randint(8, LONGEST)
    chunk = 0
    if hits is not None:
        (block_size, chunk), max_model_len = hits, LONGEST
    chat = Chat(seed, block_size, chunk) if chunk else None
    groups = _windows(seed, max_model_len) if windows else NO_WINDOWS
    least_blocks = most_blocks(max_model_len, block_size, groups)
    engine, runner = hashing_engine(
        num_blocks=rng.randint(least_blocks, least_blocks * (1 if windows and crowded else 3)),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 6),
        max_model_len=max_model_len,
        overlap=(overlap := max(rng.choice([0, 0, 1, 1, 3]), int(crowded))),
        knobs=_knobs(rng, groups, max_model_len, chunk),
        queue=rng.choice(QUEUES)() if kv is None else _bounded(kv, rng.choice(QUEUES)),
        order=rng.choice([FirstComeFirstServed(), ByPriority(), BY_AGE]),
        admission=StaticBatch(rng.randint(1, 5), 0.05) if rng.random() < 0.2 else Continuous(),
        prefix_caching=rng.random() < 0.8 or chat is not None,
        predictions=predictions(max_model_len) if rng.random() < 0.5 else None,
        host_blocks=(host := 0 if windows else rng.choice([0, 0, 1, 4, 20])),
        disk_blocks=rng.choice([0, 2, 8, 40]) if host else 0,
        restore=rng.choice([AlwaysRestore(), Fickle()]),
        holds=Compiling(seed) if seed % 3 == 0 else None,
        drafter=(drafter := _drafter(seed, groups) if drafts else None),
        peers=(peers := _peers(seed) if host and not states else None),
        checkpoints=_checkpoints(chats, crowded, int(chat is not None)) if states else None,
        windows=groups,
    )
    runner.disk_steps = rng.randint(0, 5)
    breaking = rng.choice([0.0, 0.0, 0.3])
    failures = random.Random(seed + 1)
    runner.breaks = lambda move: failures.random() < breaking
    if overlap == 0:
        runner.interrupts = lambda plan: failures.random() < 0.3
    record = Record()
    requests: dict[str, Request] = {}
    disturbed: set[str] = set()
    prefixes = [
        tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, max_model_len // 2))) for _ in range(3)
    ]
    if peers is not None:
        peers.hold(prefixes[0], block_size, "a")
        peers.hold(prefixes[1], block_size)
    shapes = random.Random(seed + 3)  # its own, like that of `Compiling`
    following, pictures = random.Random(seed + 5), random.Random(seed + 7)
    now = 0.0
    count = rng.randint(1, 40 if host else 14)
    for number in range(count if chat is None else 20 + 2 * len(chat.residues)):
        if chat is not None and number >= count and not chat.left(record):
            break
        tokens = rng.choice(prefixes)[: rng.randint(1, max_model_len)] if rng.random() < 0.7 else ()
        tokens += tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0 if tokens else 1, 12)))
        if (states or windows) and requests and chats.random() < (0.8 if crowded else 0.4):
            tokens = (*_earlier(chats, requests, record, crowded), *tokens[: chats.randint(0, 4)])
        if turn := chat is not None and chats.random() < 0.8:
            tokens = chat.prompt(record)
        shown: tuple[ImageSpan, ...] = ()
        if images:
            tokens, shown = _with_images(tokens, pictures)
        params = _params(rng, shapes)
        if turn and chats.random() < 0.8:
            params = replace(params, max_tokens=1)
        follows = peers is not None and following.random() < 0.3
        request = Request(
            id=f"r{number}",
            peer="peer" if follows else "",
            follows=follows,
            tokens=tokens,
            params=params,
            arrived=now,
            tenant=rng.choice("ab"),
            service_class=rng.choice(["priority", "default", "default", "flex", "background"]),
            priority=rng.randint(-1, 1),
            deadline=now + rng.random() * 0.05 if rng.random() < 0.1 else None,
            slo=rng.choice([NO_SLO, Slo(0.01), Slo(0.05, 0.004)]),
            salt=rng.choice(["", "a"]) if not turn else "",
            retention=rng.choice(
                [(), (), (Retention(0, None, rng.choice([0, 80]), rng.choice([None, 0.004])),)]
            ),
            seed=rng.choice([0, number]),
            eos_token_ids=frozenset({7, 8}),
            images=shown,
        )
        requests[request.id] = request
        engine.submit(request, now)
        steps = rng.randint(0, 4)
        for taken in range(40 if (waits := turn and chats.random() < 0.9) else steps):
            if waits and taken >= steps and request.id in record.ends:
                break
            now += 0.001
            if overlap == 0 and taken % 3 == 2:
                engine.beside(lambda room: min(room, 0.002))
            if taken % 5 in (1, 3):
                engine.background(1 if taken % 5 == 1 else -1)
            if peers is not None:
                peers.tick()
                if following.random() < 0.2:
                    peers.lost = following.random() < 0.2
                    prompt = following.choice(list(requests.values()))
                    end = following.randint(0, 64)
                    end = max([end, *(span.end for span in prompt.images)])
                    peers.hold(prompt.tokens[:end], block_size, prompt.salt, prompt.images)
            record.fold(engine.step(now))
            engine.check_consistency()
            check_kv(engine, kv)
            if crowded and chats.random() < 0.1:
                disturbed.add(unlucky := chats.choice(list(requests)))
                engine.cancel(unlucky, FinishReason.CANCELLED, now)
        chance = rng.random()
        victim = rng.choice(list(requests))
        if chance < 0.15:
            engine.cancel(victim, FinishReason.CANCELLED, now)
            disturbed.add(victim)
        elif chance < 0.2:
            runner.poison.add(victim)
            disturbed.add(victim)
        elif chance < 0.23:
            engine.reset_prefix_cache()
    if peers is not None:
        peers.answer_all()
    drain(engine, record, now, max_steps=20_000)
    engine.check_consistency()
    _check_ends(requests, disturbed, record, max_model_len, groups)
    if drafter is not None and not record.of(DraftingFailed):
        reported = record.of(Verified)
        assert sum(each.drafted for each in reported) == drafter.drafted
        assert sum(each.accepted for each in reported) == drafter.accepted
        assert sorted(drafter.ends) == sorted(requests.keys() - _rejected(record))
    for request_id in requests:
        losses = [e for e in record.of(Preempted) if e.request_id == request_id and e.reason != "yield"]
        assert len(losses) <= MAX_PREEMPTIONS, f"{request_id} was preempted {len(losses)} times"
    return record


def _bounded(kv: KvBounds, drawn: object) -> FairQueue:
    """A queue with bounds, whose tenants prefer the shortest prompt; ``drawn`` keeps the numbers of other lives."""

    class Shortest:
        def pick(self, window: Sequence[Waiting]) -> int:
            return min(range(len(window)), key=lambda each: len(window[each].tokens))

    return FairQueue(ShareLedger(CLASSES, {"a": 3.0}, kv), lambda: TenantQueue(Shortest(), 4))


def check_kv(engine: Engine, kv: KvBounds | None) -> None:
    """No tenant and no class holds more than its bound, except by one request that runs alone in it."""
    held: dict[tuple[str, str], list[int]] = {}
    for each in engine.scheduler.live.values():
        if each.slot >= 0 and each.request.service_class != "background":
            for owner in (("tenant", each.request.tenant), ("class", each.request.service_class)):
                held.setdefault(owner, []).append(each.finish_length)
    for (kind, name), tokens in held.items() if kv is not None else ():
        bound = kv.of_tenant(name) if kind == "tenant" else kv.classes.get(name)
        assert bound is None or len(tokens) == 1 or sum(tokens) <= bound, (
            f"{kind} {name} holds {tokens} of {bound}"
        )


def _params(rng: random.Random, shapes: random.Random) -> SamplingParams:
    """When an answer ends by ``rng``; whether it is greedy, and its grammar, by ``shapes``."""
    max_tokens, ignore_eos = rng.choice([None, 1, rng.randint(1, 20)]), rng.random() < 0.3
    stop_token_ids = (5,) if rng.random() < 0.3 else ()
    grammar = shapes.choice(["", "", "", "a+", "b+"])
    return SamplingParams(
        temperature=shapes.choice([0.0, 1.0]),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos and not grammar,
        stop_token_ids=stop_token_ids,
        structured_outputs=Constraint(ConstraintKind.REGEX, grammar) if grammar else None,
    )


def _rejected(record: Record) -> set[str]:
    """Requests that never became a sequence."""
    never = (FinishReason.REJECTED, FinishReason.UNREACHABLE)
    return {name for name, (end,) in record.ends.items() if end.reason in never}


def _check_ends(
    requests: dict[str, Request],
    disturbed: set[str],
    record: Record,
    max_model_len: int,
    groups: WindowGroups,
) -> None:
    assert record.ends.keys() == requests.keys(), "a request without an end"
    for request_id, request in requests.items():
        (end,) = record.ends[request_id]
        got = record.tokens.get(request_id, [])
        assert end.output_tokens == len(got)
        if end.reason is FinishReason.REJECTED:
            assert len(request.tokens) >= max_model_len
            assert not got
            continue
        limit = max_model_len - len(request.tokens)
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens)
        stops = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stops |= request.eos_token_ids
        own = seed_of(request.params, request.seed)
        prompt = seen(request.tokens, request.images)
        want = expected_tokens(prompt, own, limit, stops, grammar_of(request.params), groups)
        assert got == want[: len(got)], f"{request_id} has a wrong token"
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == want
            assert (end.reason is FinishReason.STOP) == (want[-1] in stops)
        elif end.reason in (FinishReason.TIMEOUT, FinishReason.UNREACHABLE):
            assert request.deadline is not None
        else:
            assert request_id in disturbed, f"{request_id} ended with {end.reason}: {end.message}"
