"""What a simulated client sends, and what it will be answered: the latter is known to the runner alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace.core.request import Request, SamplingParams
from headrace.lab.simulate.runner import EOS_IDS
from headrace.lab.workload import Work
from headrace.lab.workload.call import Call
from headrace.lab.workload.synthesis import Synthesis


class Asked(NamedTuple):
    """A request and the tokens of its answer, of which the last one ends it."""

    request: Request
    answer: tuple[int, ...]


def from_calls(calls: Iterable[Call], synthesis: Synthesis, max_tokens: int | None = None) -> Iterator[Asked]:
    """The calls of a trace. Each request asks for ``max_tokens`` at most (None: as far as the context reaches)."""
    params = SamplingParams(max_tokens=max_tokens)
    for number, call in enumerate(calls):
        request = Request(
            f"r{number}",
            synthesis.prompt(call),
            params,
            call.arrival,
            call.tenant,
            call.service_class,
            salt=call.tenant,
            eos_token_ids=EOS_IDS,
        )
        yield Asked(request, synthesis.answer(call))


def from_work(work: Iterable[Work], start: float = 0.0) -> Iterator[Asked]:
    """Work whose prompts are token ids, arriving after ``start``; an answer is as long as its work allows, and the
    engine may know."""
    for each in work:
        if not isinstance(each.prompt, tuple) or not isinstance(each.prompt[0], int):
            raise ValueError(f"{each.id}: only prompts of token ids can be simulated")
        params = SamplingParams(max_tokens=each.max_tokens, ignore_eos=True)
        tokens: tuple[int, ...] = each.prompt
        yield Asked(Request(each.id, tokens, params, start + each.arrival), (0,) * each.max_tokens)
