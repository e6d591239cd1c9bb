"""Simulated requests with their outputs, which only the simulated runner knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace.core.request import NO_SLO, Request, SamplingParams, Slo
from headrace.lab.simulate.runner import EOS_IDS
from headrace.lab.workload.call import Call
from headrace.lab.workload.synthesis import Synthesis
from headrace.lab.workload.work import Work


class SimulatedRequest(NamedTuple):
    """A request and its output tokens; the last one ends the output."""

    request: Request
    answer: tuple[int, ...]


def from_calls(
    calls: Iterable[Call], synthesis: Synthesis, max_tokens: int | None = None, slo: Slo = NO_SLO
) -> Iterator[SimulatedRequest]:
    """Requests from the calls of a trace, all with ``max_tokens`` (None: up to the context limit) and ``slo``."""
    params = SamplingParams(max_tokens=max_tokens)
    for number, call in enumerate(calls):
        request = Request(
            f"r{number}",
            synthesis.prompt(call),
            params,
            call.arrival,
            call.tenant,
            call.service_class,
            slo=slo,
            salt=call.tenant,
            eos_token_ids=EOS_IDS,
        )
        yield SimulatedRequest(request, synthesis.answer(call))


def from_work(work: Iterable[Work], start: float = 0.0) -> Iterator[SimulatedRequest]:
    """Requests from work with prompts of token ids, arriving after ``start``. Outputs have exactly ``max_tokens``, and
    the engine knows this (``ignore_eos``)."""
    for each in work:
        if not isinstance(each.prompt, tuple) or not isinstance(each.prompt[0], int):
            raise ValueError(f"{each.id}: only prompts of token ids can be simulated")
        params = SamplingParams(max_tokens=each.max_tokens, ignore_eos=True)
        tokens: tuple[int, ...] = each.prompt
        yield SimulatedRequest(Request(each.id, tokens, params, start + each.arrival), (0,) * each.max_tokens)
