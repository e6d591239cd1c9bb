"""A runner that answers from a script: what the server's tests want to see on the wire.

It computes nothing. `reply` turns the prompt and the seed into the tokens of an answer; after them it draws
the end token for ever. `open_gate` lets steps through; while it is closed, every step hangs in the runner.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.core.plan import Entry, StepOutput, StepPlan, TokenLogprob

Reply = Callable[[tuple[int, ...], int], list[int]]


class ScriptedRunner:
    def __init__(self, max_num_seqs: int, reply: Reply, end_token: int, step_seconds: float = 0.0) -> None:
        self.reply = reply
        self.end_token = end_token
        self.step_seconds = step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.poison: set[str] = set()
        self.crash = False
        self._entries: list[Entry | None] = [None] * max_num_seqs
        self._outputs: deque[StepOutput] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            self._entries[entry.slot] = entry
        tokens: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        failures: dict[int, str] = {}
        for i, row in enumerate(plan.rows):
            entry = self._entries[row.slot]
            assert entry is not None
            prompt, end = entry.tokens[: entry.prompt_tokens], row.start + row.length
            if entry.request_id in self.poison:
                failures[i] = "poisoned: a secret of the inside"
            if entry.params.prompt_logprobs is not None and row.start < len(prompt):
                scored = prompt[row.start + 1 : end + 1]
                prompt_logprobs[i] = tuple(self._score(t, entry.params.prompt_logprobs) for t in scored)
            if not row.samples:
                tokens.append(())
                continue
            answer = self.reply(prompt, entry.seed)
            number = end - len(row.drafts) - len(prompt)
            drawn: list[int] = []
            for draft in (*row.drafts, None):
                drawn.append(answer[number] if number < len(answer) else self.end_token)
                number += 1
                if drawn[-1] != draft:
                    break
            tokens.append(tuple(drawn))
            if entry.params.logprobs is not None:
                logprobs[i] = tuple(self._score(token, entry.params.logprobs) for token in drawn)
        self._outputs.append(StepOutput(plan.step, tuple(tokens), logprobs, prompt_logprobs, failures))

    def collect(self) -> StepOutput:
        self.gate.wait()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.crash:
            raise RuntimeError("the device fell off the bus")
        return self._outputs.popleft()

    @staticmethod
    def _score(token: int, top: int) -> TokenLogprob:
        alternatives = [
            (token, -0.5),
            *((other, -2.0 - other / 1000) for other in range(10, 40) if other != token),
        ]
        return TokenLogprob(token, -0.5, 1, tuple(alternatives[:top]))
