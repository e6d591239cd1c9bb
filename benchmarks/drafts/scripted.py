"""Texts with known answers that a model does not write itself: quotes of the prompt, and turns of an agent.

The built-in model can write neither. A `Script` therefore replaces each token that the model has drawn by the next one
of the expected answer. Everything else is real: the model computes the same positions, the sampler draws, drafts are
proposed from the text and verified against it. Without drafts the tokens are replaced in the same way, so that a ratio
has the replacement's time on both sides.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.compute.runner import LocalRunner
from headrace.core.plan import Entry
from headrace.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[1] / "docs" / "guide"
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
    """A request: its prompt, and the text it answers with."""

    prompt: str
    answer: str


class Script:
    """Replaces what a runner draws by expected answers, which are given by request id."""

    def __init__(self, runner: LocalRunner) -> None:
        self.answers: dict[str, list[int]] = {}
        self._slots: dict[int, tuple[list[int], int]] = {}
        self._sample, self._admit = runner._sampling._sampler.sample, runner._sampling._sampler.admit
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


class Texts:
    """Makes the texts of a kind, ``extraction`` or ``agent``; no two are equal."""

    def __init__(self, kind: str, seed: str, length: int, tokenizer: Tokenizer) -> None:
        self._kind = kind
        self._random = random.Random(seed)
        self._length = length
        self._tokenizer = tokenizer
        pages = [path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md"))]
        pages = [re.sub(r"```.*?```|\|.*|<[^>]*>", "", page, flags=re.DOTALL) for page in pages]
        self._pages = [page for page in pages if len(page.split()) > 500]

    def item(self) -> Item:
        """One request."""
        rng = self._random
        if self._kind == "agent":
            turns = [self._turn() for _ in range(12)]
            return Item(
                f"Fix the bug in {rng.choice(FILES)}.py, ticket {rng.randrange(10**6)}.", "".join(turns)
            )
        text = self._piece(2 * self._length)
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
