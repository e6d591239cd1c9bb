"""Speed with speculative decoding divided by speed without, for texts of one kind and several batch sizes.

- ``unpredictable``: random text (a high temperature) and predictions of other random text; all proposers that need no
  model are on. Automatic lengths must not be slower than drafting off.
- ``forced``: drafts that are right with probability ``--acceptance``, of automatic or fixed ``--length``.
- ``edits``: the prediction is the answer with 5 % of its tokens replaced, deleted or inserted.
- ``chats``: stories by the built-in model, drafted by its draft model.
- ``mixed``: a third of the requests are edits, the others unpredictable.
- ``extraction``: sentences of the prompt are quoted, with a few words between them; drafts by ``ngram``.
- ``agent``: turns of an agent, which repeat earlier ones with other names and numbers; drafts by ``suffix``.

Texts of the last two kinds are not the model's own: see `benchmarks.drafts.scripted`. Each round has new ones.
With ``--shape`` the model and its draft model have the sizes of published models: see `benchmarks.drafts.widened`.

The engine without drafts and the engine with drafts live as long as the script. In each round they compute the same
requests, in turns of a few steps, each with a clock that is paused meanwhile. The figures are medians of the rounds'
ratios, with the quartiles beside them. With ``--control`` neither engine drafts: what differs from 1 then is the error
of the comparison. On a busy machine use ``--clock cpu``: everything is then computed by one thread, and its CPU time is
the time, for the engine too.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.drafts.scripted import Script, Texts
from benchmarks.drafts.widened import write_pair
from benchmarks.peers.shapes import WIDENED
from benchmarks.stage import arguments, publish, say
from headrace import LLM, SamplingParams
from headrace.compute.device import resolve_device
from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.events import Emitted, Event, Finished, Stepped, Verified
from headrace.core.request import Request
from headrace.lab.bench.stats import percentile
from headrace.lab.forced_acceptance import ForcedAcceptance

PROMPT_TOKENS = 32
RANDOM_TEMPERATURE = 50.0
"""The temperature of unpredictable text."""

TURN_STEPS = 16
"""Steps of an engine before the other one has its turn: what disturbs the machine for longer disturbs both. The weights
of a small model and of its draft model leave the caches meanwhile, so with short turns a draft model looks slow.
"""

EDITED_SHARE = 0.05
"""Share of an answer's tokens that are edited in a prediction."""

CONFIGS: dict[str, dict[str, Any]] = {
    "unpredictable": {"method": ["prediction", "ngram", "suffix"]},
    "forced": {"method": "ngram"},
    "edits": {"method": "prediction"},
    "chats": {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": 6},
    "mixed": {"method": ["prediction", "ngram"]},
    "extraction": {"method": "ngram"},
    "agent": {"method": "suffix"},
}
SCRIPTED = ("extraction", "agent")
CLOCKS = {"wall": time.monotonic, "cpu": time.process_time}
HEROES = (
    "a fox",
    "a mouse",
    "a robot",
    "a girl called Ada",
    "an old sailor",
    "a dragon",
    "a baker",
    "two owls",
)

Answers = dict[tuple[int, ...], tuple[int, ...]]


class BatchResult(NamedTuple):
    """Time and answers of a batch."""

    seconds: float
    answers: Answers
    tokens: int
    steps: int
    drafted: int
    accepted: int
    gap: float
    """The 99th percentile of the seconds between tokens; those of one step share its time."""


class Running:
    """A batch on the engine alone, without text. Its clock is paused while another engine has its turn."""

    def __init__(self, llm: LLM, requests: Sequence[Request], clock: Callable[[], float]) -> None:
        self._engine = llm.loaded.engine
        self._clock = clock
        self._requests = requests
        self._answers: dict[str, list[int]] = {each.id: [] for each in requests}
        self._last: dict[str, float] = {}
        self._came: list[
            tuple[int, float]
        ] = []  # tokens of a request at once, and the seconds since those before
        self._steps = self._drafted = self._accepted = 0
        self.left = len(requests)
        self.seconds = 0.0
        self._engine.reset_prefix_cache()
        for each in requests:
            self._engine.submit(each, 0.0)

    def run_steps(self, steps: int) -> None:
        """Run ``steps`` steps, or until all requests have finished."""
        began = self._clock() - self.seconds
        for _ in range(steps):
            if not self.left:
                break
            self._count(self._engine.step(self._clock() - began), self._clock() - began)
        self.seconds = self._clock() - began

    def _count(self, events: Sequence[Event], now: float) -> None:
        for event in events:
            if isinstance(event, Emitted):
                self._answers[event.request_id] += event.tokens
                if event.request_id in self._last:
                    self._came.append((len(event.tokens), now - self._last[event.request_id]))
                self._last[event.request_id] = now
            elif isinstance(event, Stepped):
                self._steps += 1
            elif isinstance(event, Verified):
                self._drafted += event.drafted
                self._accepted += event.accepted
            elif isinstance(event, Finished):
                self.left -= 1

    def result(self) -> BatchResult:
        """The result, after all requests have finished."""
        found = {each.tokens: tuple(self._answers[each.id]) for each in self._requests}
        gaps = sorted(gap / tokens for tokens, gap in self._came for _ in range(tokens))
        gap, tokens = gaps[int(0.99 * len(gaps))], sum(map(len, found.values()))
        return BatchResult(self.seconds, found, tokens, self._steps, self._drafted, self._accepted, gap)


def run(
    llms: Sequence[LLM],
    requests: Sequence[Request],
    clock: Callable[[], float] = time.monotonic,
    turn: int = TURN_STEPS,
) -> list[BatchResult]:
    """Run the requests on each engine; they take turns of ``turn`` steps."""
    running = [Running(llm, requests, clock) for llm in llms]
    while any(each.left for each in running):
        for each in running:
            each.run_steps(turn)
    return [each.result() for each in running]


class RequestMaker:
    """Makes the requests of a kind of text for a batch size.

    Ids never repeat. Nor do seeds, in other batch sizes either: a hot request draws the same text with the same seed,
    whatever its prompt is, and `suffix` would find it among the past outputs.
    """

    def __init__(
        self, llm: LLM, kind: str, length: int, seed: int, batch: int, scripts: Sequence[Script] = ()
    ) -> None:
        self._llm = llm
        self._scripts = scripts
        self._texts = Texts(kind, f"{seed} {batch}", length, llm.tokenizer)
        self._kind = kind
        self._length = length
        self._random = random.Random(f"{seed} {batch}")
        self._words = range(100, min(2000, llm.loaded.tokenizer.vocab_size))
        self._ids = itertools.count()

    def prompts(self, batch: int) -> list[tuple[int, ...]]:
        """New prompts of a batch."""
        if self._kind in ("unpredictable", "forced"):
            return [self._text(PROMPT_TOKENS) for _ in range(batch)]
        tokenizer = self._llm.loaded.tokenizer
        found = []
        for at in range(batch):
            hero = HEROES[at % len(HEROES)]
            message = f"Tell me a long story about {hero}." if at < 8 else f"Write story {at} about {hero}."
            found.append(tuple(tokenizer.encode(f"<|bos|><|user|>{message}<|end|><|assistant|>", False)))
        return found

    def requests(
        self, prompts: Sequence[tuple[int, ...]], known: Answers | None, number: int
    ) -> list[Request]:
        """Requests for the prompts; ``known`` are their answers. With scripts the prompts are new."""
        if self._scripts:
            return [self._scripted() for _ in prompts]
        made = []
        for at, prompt in enumerate(prompts):
            random_text = self._kind == "unpredictable" or (self._kind == "mixed" and at % 3)
            params = SamplingParams(
                temperature=RANDOM_TEMPERATURE if random_text else 0.0,
                max_tokens=self._length,
                ignore_eos=True,
            )
            answer = () if known is None else known[prompt]
            prediction: tuple[int, ...] = ()
            if random_text:
                prediction = self._text(self._length)
            elif self._kind in ("edits", "mixed"):
                prediction = self.edited(answer)
            name = f"{self._kind}{number}-{next(self._ids)}"
            made.append(
                Request(name, prompt, params, seed=self._random.getrandbits(31), prediction=prediction)
            )
        return made

    def _scripted(self) -> Request:
        """A request whose answer the scripts know."""
        encode, item = self._llm.tokenizer.encode, self._texts.item()
        answer, name = encode(item.answer, False)[: self._length], f"{self._kind}-{next(self._ids)}"
        for script in self._scripts:
            script.answers[name] = answer
        params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
        return Request(name, tuple(encode(item.prompt)), params)

    def edited(self, answer: Sequence[int]) -> tuple[int, ...]:
        """The answer with some tokens replaced, deleted or inserted."""
        rng, text = self._random, list[int]()
        for token in answer:
            way = rng.random() / EDITED_SHARE
            if way >= 1:
                text.append(token)
            elif way < 1 / 3:
                text.append(rng.choice(self._words))
            elif way < 2 / 3:
                text += (token, rng.choice(self._words))
        return tuple(text)

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._words, k=length))


def open_engines(stack: ExitStack, args: Any) -> list[LLM]:
    """The engine without drafts and the engine with drafts."""
    model, config = args.model, dict(CONFIGS[args.kind])
    if args.shape:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, draft = map(str, write_pair(args.shape, folder))
        config |= {"model": draft} if "model" in config else {}
    options: dict[str, Any] = {"load_format": args.load_format, "device": args.device}
    if args.kind in SCRIPTED:
        options["max_model_len"] = 4096
    if resolve_device(args.device).type == "cuda":
        options["kv_cache_memory_bytes"] = 8 << 30  # there are two engines
    configs = (None, None if args.control else json.dumps(config))
    return [stack.enter_context(LLM(model, speculative_config=each, **options)) for each in configs]


def measure(plain: LLM, drafting: LLM, args: Any, batch: int, scripts: Sequence[Script]) -> dict[str, float]:
    """The ratios of one batch size."""
    clock = CLOCKS[args.clock]
    maker = RequestMaker(plain, args.kind, args.output_len, args.seed, batch, scripts)
    prompts = maker.prompts(batch)
    answers = run([plain], maker.requests(prompts, None, 0), clock)[0].answers
    if args.kind == "forced":
        forced = ForcedAcceptance(answers, args.acceptance, args.length or 8, args.seed)
        drafter = BudgetedDrafter([forced], Acceptance(), DraftBudget(args.length))
        drafting.loaded.engine.scheduler._drafted._drafter = drafter
    ratios, gaps, speeds, last = list[float](), list[float](), list[float](), None
    for number in range(args.rounds + 2):  # the first two warm up
        requests = maker.requests(prompts, answers, number)
        if number % 2:
            without, last = run([plain, drafting], requests, clock, args.turn)
        else:
            last, without = run([drafting, plain], requests, clock, args.turn)
        if without.answers != last.answers:
            same = sum(last.answers[each] == answer for each, answer in without.answers.items())
            say(f"batch {batch}: {batch - same} answers differ with drafts")
        if number > 1:
            ratios.append(without.seconds / last.seconds)
            gaps.append(last.gap / without.gap)
            speeds.append(without.tokens / without.seconds)
    assert last is not None
    return {
        "batch": batch,
        "ratio": statistics.median(ratios),
        "low": percentile(ratios, 25),
        "high": percentile(ratios, 75),
        "itl_p99": statistics.median(gaps),
        "plain": statistics.median(speeds),
        "tokens_per_step": last.tokens / last.steps / batch,
        "drafted_per_row": last.drafted / last.steps / batch,
        "accepted": last.accepted / max(1, last.drafted),
    }


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "", rounds=9)
    parser.add_argument("kind", choices=tuple(CONFIGS))
    parser.add_argument("--shape", choices=tuple(WIDENED), help="the built-in models at a published size")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS))
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--acceptance", type=float, default=0.0, help="of kind forced")
    parser.add_argument("--length", type=int, help="of each draft of kind forced; without it automatic")
    parser.add_argument(
        "--turn", type=int, default=TURN_STEPS, help="steps of a turn; take many for a draft model"
    )
    parser.add_argument("--control", action="store_true", help="drafts in neither engine")
    args = parser.parse_args()
    if args.clock == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    found = []
    with ExitStack() as stack:
        plain, drafting = open_engines(stack, args)
        scripts = [Script(llm.loaded.runner) for llm in (plain, drafting) if args.kind in SCRIPTED]
        for batch in args.batches:
            row = measure(plain, drafting, args, batch, scripts)
            found.append(row)
            say(
                f"{args.kind} batch {batch:3}: {row['ratio']:.3f}x ({row['low']:.3f} to {row['high']:.3f})"
                f"; p99 ITL {row['itl_p99']:.2f}x; {row['plain']:.0f} tokens/s without;"
                f" per step {row['tokens_per_step']:.2f} tokens and"
                f" {row['drafted_per_row']:.2f} drafts a row, {row['accepted']:.0%} accepted"
            )
    publish(f"drafts-{args.kind}", args, [], [], rows=found)


if __name__ == "__main__":
    main()
