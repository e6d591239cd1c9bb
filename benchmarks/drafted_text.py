"""Speed with speculative decoding divided by speed without, on real text.

- ``edits``: a text of 300 tokens is written again with 5 % of its words changed; the original is the ``prediction``.
- ``extraction``: sentences of the prompt are quoted, with a few words between them; drafts by ``ngram``.
- ``agent``: turns of an agent, which repeat earlier ones with other names and numbers; drafts by ``suffix``.
- ``chats``: stories that the built-in model writes itself; drafts by its draft model.

The built-in model can write no edits, quotes or tool calls. In the first three kinds the script therefore replaces each
token that the model has drawn by the next one of the expected answer. Everything else is real: the model computes the
same positions, the sampler draws, drafts are proposed from the text and verified against it. Without drafts the tokens
are replaced in the same way, so that the ratio has the replacement's time on both sides.

An engine with drafts and one without live as long as the script and take turns. Each round has new texts. A ratio is
one of neighbours in a round, with prefill and without; the figures are medians.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.stage import arguments, say
from headrace import LLM, SamplingParams
from headrace.compute.runner import LocalRunner
from headrace.core.events import Emitted, Finished, Stepped, Verified
from headrace.core.plan import Entry
from headrace.core.request import Request
from headrace.serve.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[1] / "docs" / "guide"
CHANGED = 0.05
"""Share of the words that an edit changes."""

CONFIGS: Mapping[str, dict[str, Any]] = {
    "edits": {"method": "prediction"},
    "extraction": {"method": "ngram"},
    "agent": {"method": "suffix"},
    "chats": {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": 6},
}
TARGETS: Mapping[str, Mapping[int, float]] = {
    "edits": {1: 3.0, 4: 2.3, 16: 1.6, 32: 1.5},
    "extraction": {1: 2.0},
    "agent": {1: 2.5},
    "chats": {1: 1.3},
}
TOOLS = ("read_file", "list_files", "search", "run_tests", "edit_file")
FILES = ("parser", "lexer", "server", "client", "queue", "cache", "router", "config", "worker", "report")
TURN = """I will look at {file}.py first, because the failing test imports it.
<tool_call>
{{"name": "{tool}", "arguments": {{"path": "src/{file}.py", "first_line": {line}, "last_line": {last}}}}}
</tool_call>
The function on line {line} of src/{file}.py returns before the lock is released. I change it so that the lock is
released in a finally block, and run the tests of {file} again.
"""


class Item(NamedTuple):
    """A request: its prompt, the text it answers with, and what its client predicts."""

    prompt: str
    answer: str
    prediction: str = ""


class Script:
    """Replaces what a runner draws by expected answers, which are given by request id."""

    def __init__(self, runner: LocalRunner) -> None:
        self.answers: dict[str, list[int]] = {}
        self._slots: dict[int, tuple[list[int], int]] = {}
        self._sample, self._admit = runner._sampling._sampler.sample, runner._sampler.admit
        runner._sampling._sampler.sample = self.sample  # type: ignore[method-assign]
        runner._sampling._sampler.admit = self.admit  # type: ignore[method-assign]

    def admit(self, entry: Entry) -> Any:
        """A request takes a slot."""
        if entry.request_id in self.answers:
            self._slots[entry.slot] = (self.answers[entry.request_id], entry.prompt_tokens)
        else:
            self._slots.pop(entry.slot, None)
        return self._admit(entry)

    def sample(
        self, logits: torch.Tensor, slots: Any, positions: Any, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Draw, and replace."""
        drawn = self._sample(logits, slots, positions, *more, **named)
        if not self._slots:
            return drawn
        tokens = []
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            answer, begin = self._slots[slot]
            tokens.append(answer[min(position - begin, len(answer) - 1)])
        return torch.tensor(tokens, dtype=drawn.dtype, device=drawn.device)


class Maker:
    """Makes the texts of a kind; no two are equal."""

    def __init__(self, kind: str, seed: int, length: int, tokenizer: Tokenizer) -> None:
        self._kind = kind
        self._random = random.Random(seed)
        self._length = length
        self._tokenizer = tokenizer
        pages = [path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md"))]
        pages = [re.sub(r"```.*?```|\|.*|<[^>]*>", "", page, flags=re.DOTALL) for page in pages]
        self._pages = [page for page in pages if len(page.split()) > 500]
        self._vocabulary = sorted(set(" ".join(self._pages).split()))

    def item(self) -> Item:
        """One request."""
        rng = self._random
        if self._kind == "agent":
            turns = [self._turn() for _ in range(12)]
            return Item(
                f"Fix the bug in {rng.choice(FILES)}.py, ticket {rng.randrange(10**6)}.", "".join(turns)
            )
        text = self._piece(self._length * (1 if self._kind == "edits" else 2))
        if self._kind == "edits":
            words = text.split(" ")
            changed = [rng.choice(self._vocabulary) if rng.random() < CHANGED else word for word in words]
            return Item(f"Improve this text:\n{text}\n", " ".join(changed), text)
        sentences = [each.strip() for each in re.split(r"(?<=[.:])\s+", text) if len(each.split()) > 5]
        quoted = sorted(rng.sample(range(len(sentences)), max(1, len(sentences) * 2 // 3)))
        answer = "\n".join(f"{at}) It says: {sentences[place]}" for at, place in enumerate(quoted, 1))
        return Item(f"Quote the important sentences of this text:\n{text}\n", answer)

    def _piece(self, tokens: int) -> str:
        """So many tokens of a page, from a word on."""
        words = self._random.choice(self._pages).split(" ")
        begin = self._random.randrange(len(words) - 200)
        text = " ".join(words[begin : begin + tokens])
        return self._tokenizer.decode(self._tokenizer.encode(text, add_special_tokens=False)[:tokens])

    def _turn(self) -> str:
        rng = self._random
        line = rng.randrange(900)
        last = line + rng.randrange(60)
        return TURN.format(file=rng.choice(FILES), tool=rng.choice(TOOLS), line=line, last=last)


class Ran(NamedTuple):
    """Seconds of both clocks, those after all first tokens, tokens, steps, drafts, and the answers."""

    wall: float
    cpu: float
    decoding: float
    tokens: int
    steps: int
    drafted: int
    accepted: int
    answers: Mapping[str, tuple[int, ...]]


def run(llm: LLM, requests: Sequence[Request]) -> Ran:
    """Run the requests together on the engine alone."""
    engine = llm.loaded.engine
    engine.reset_prefix_cache()
    answers: dict[str, list[int]] = {each.id: [] for each in requests}
    left, steps, drafted, accepted = len(requests), 0, 0, 0
    first = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    for each in requests:
        engine.submit(each, time.monotonic())
    while left:
        for event in engine.step(time.monotonic()):
            if isinstance(event, Emitted):
                if not answers[event.request_id]:
                    first = time.perf_counter()
                answers[event.request_id] += event.tokens
            elif isinstance(event, Stepped):
                steps += 1
            elif isinstance(event, Verified):
                drafted += event.drafted
                accepted += event.accepted
            elif isinstance(event, Finished):
                left -= 1
    end = time.perf_counter()
    seconds = end - wall, time.process_time() - cpu, end - first
    found = {name: tuple(tokens) for name, tokens in answers.items()}
    return Ran(*seconds, sum(map(len, found.values())), steps, drafted, accepted, found)


class Pair:
    """An engine without drafts and one with them."""

    def __init__(self, plain: LLM, drafting: LLM, args: Any) -> None:
        self._llms = (plain, drafting)
        self._args = args
        self._maker = Maker(args.kind, args.seed, args.output_len, plain.tokenizer)
        self._ids = itertools.count()
        self._scripts = [] if args.kind == "chats" else [Script(llm.loaded.runner) for llm in self._llms]

    def requests(self, batch: int) -> list[Request]:
        """New requests, whose answers the scripts know."""
        encode, length = self._llms[0].tokenizer.encode, self._args.output_len
        made = []
        for _ in range(batch):
            name = f"t{next(self._ids)}"
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            if not self._scripts:
                text = f"<|bos|><|user|>Write story {name[1:]} about a fox.<|end|><|assistant|>"
                made.append(Request(name, tuple(encode(text, add_special_tokens=False)), params))
                continue
            item = self._maker.item()
            answer = encode(item.answer, add_special_tokens=False)[:length]
            for script in self._scripts:
                script.answers[name] = answer
            params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
            prediction = tuple(encode(item.prediction, add_special_tokens=False)) if item.prediction else ()
            made.append(Request(name, tuple(encode(item.prompt)), params, prediction=prediction))
        return made

    def measure(self, batch: int) -> dict[str, float]:
        """Medians of the ratios of one batch size."""
        wall, cpu, decoding, last = list[float](), list[float](), list[float](), list[Ran]()
        for number in range(self._args.rounds + 2):  # the first two warm up
            requests = self.requests(batch)
            order = (0, 1) if number % 2 else (1, 0)
            ran = {which: run(self._llms[which], requests) for which in order}
            last = [ran[0], ran[1]]
            if ran[0].answers != ran[1].answers:
                say(f"batch {batch}: answers differ with drafts")
            if number > 1:
                wall.append(ran[0].wall / ran[1].wall)
                cpu.append(ran[0].cpu / ran[1].cpu)
                decoding.append(ran[0].decoding / ran[1].decoding)
        plain, drafted = last
        low, _, high = statistics.quantiles(wall, n=4) if len(wall) > 1 else (wall[0],) * 3
        return {
            "batch": batch,
            "ratio": statistics.median(wall),
            "low": low,
            "high": high,
            "cpu": statistics.median(cpu),
            "decoding": statistics.median(decoding),
            "plain": plain.tokens / plain.wall,
            "tokens_per_step": drafted.tokens / drafted.steps / batch,
            "drafted_per_step": drafted.drafted / drafted.steps / batch,
            "accepted": drafted.accepted / max(1, drafted.drafted),
        }


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "", rounds=9)
    parser.add_argument("kind", choices=tuple(CONFIGS))
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--output-len", type=int, default=300)
    args = parser.parse_args()
    options: dict[str, Any] = {"load_format": args.load_format, "device": args.device, "max_model_len": 4096}
    config, found = json.dumps(CONFIGS[args.kind]), []
    with (
        LLM(args.model, **options) as plain,
        LLM(args.model, speculative_config=config, **options) as drafting,
    ):
        pair = Pair(plain, drafting, args)
        for batch in args.batches:
            row = pair.measure(batch)
            found.append(row)
            target = TARGETS[args.kind].get(batch)
            say(
                f"{args.kind} batch {batch:3}: {row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f}), CPU"
                f" {row['cpu']:.2f}x, after the prompts {row['decoding']:.2f}x"
                + (f", target {target}" if target else "")
                + f"; {row['plain']:.0f} tokens/s without; per step and row {row['tokens_per_step']:.2f} tokens,"
                f" {row['drafted_per_step']:.2f} drafts, {row['accepted']:.0%} accepted"
            )
    path = args.output or Path("bench-results") / f"drafted-text-{args.kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"command": vars(args), "rows": found}, indent=2, default=str) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
