"""Compares two requests with the served model: whether one answer is right for both.

A prompt with both, in both orders, and one token that may only begin Yes or No. The log-probabilities of the two
decide. The request has the background class, and belongs to the tenant whose requests it compares.
"""

from __future__ import annotations

import math

from headrace.api.compile.bodies import Conversation
from headrace.api.compile.encode import conversation_tokens
from headrace.api.compile.model import ServedModel
from headrace.core.events import Emitted
from headrace.core.plan import TokenLogprob
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.classes import BACKGROUND
from headrace.response_cache.rules.verdicts import Pair
from headrace.response_cache.warmer import ID_PREFIX, Begun
from headrace.service.service import Service

PROMPT = """Two users send a message each to the same assistant. Would one answer be complete and correct for both? \
Say No if the messages differ in a number, a date, a name, a place, a person, an amount, a direction or an order, \
if one negates or narrows the other, or if they ask for different things. Say Yes only if they mean the same.

Message 1: How do I turn on the heating?
Message 2: How do I turn off the heating?
Answer: No

Message 1: How do I reset my password?
Message 2: What is the way to reset my password?
Answer: Yes

Message 1: Is the shop open on Friday?
Message 2: Is the shop open on Monday?
Answer: No

Message 1: {one}
Message 2: {other}
Answer Yes or No."""

LEAST_ODDS = math.log(0.7 / 0.3)
"""The log-odds of Yes over No from which on a pair counts as the same, in the order in which they are lower."""

_TOP = 20
"""Alternatives in which the other of the two tokens is looked for; if it is not among them, it is at most as likely."""


class PairComparison:
    """Compares pairs on ``service``, with prompts for ``model``."""

    def __init__(self, service: Service, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._asked = 0

    async def same(self, pair: Pair, begun: Begun) -> bool | None:
        """Whether one answer is right for both; None if the model could not be asked. A pair too long for it is not.

        Raises:
            ApiError: the prompt cannot be rendered.
            Refused: the server or the tenant's quota takes no more requests.
        """
        yes, no = [(await self._model.encode(word, add_special_tokens=False))[0] for word in ("Yes", "No")]
        least = math.inf
        for one, other in ((pair.cached, pair.asked), (pair.asked, pair.cached)):
            tokens = await self._prompt(one, other, pair.tenant)
            if len(tokens) >= self._model.max_model_len:
                return False
            odds = await self._odds(tokens, yes, no, pair.tenant, begun)
            if odds is None:
                return None
            least = min(least, odds)
        return least >= LEAST_ODDS

    async def _prompt(self, one: str, other: str, tenant_name: str) -> list[int]:
        said = PROMPT.format(one=_line(one), other=_line(other))
        asked = Conversation.model_validate(
            {"messages": [{"role": "user", "content": said}], "reasoning_effort": "none"}
        )
        return await conversation_tokens(self._model, asked, tenant_name)

    async def _odds(
        self, tokens: list[int], yes: int, no: int, tenant_name: str, begun: Begun
    ) -> float | None:
        """The log-odds of ``yes`` over ``no`` after a prompt; None if nothing was computed."""
        self._asked += 1
        request = Request(
            id=f"{ID_PREFIX}pair-{self._asked}",
            tokens=tuple(tokens),
            params=SamplingParams(
                temperature=0.0, max_tokens=1, allowed_token_ids=(yes, no), logprobs=_TOP, ignore_eos=True
            ),
            arrived=self._service.now(),
            tenant=tenant_name,
            service_class=BACKGROUND.name,
            salt=f"{tenant_name}\0",
            indexed=False,
        )
        answer = self._service.open([request], interval=0)
        begun()
        try:
            events = await answer.read()
        finally:
            self._service.close(answer)
        found = [event.logprobs[0] for _, event in events if isinstance(event, Emitted) and event.logprobs]
        return _log_odds(found[0], yes, no) if found else None


def _log_odds(found: TokenLogprob, yes: int, no: int) -> float:
    """The log-odds of two tokens, one of which was chosen; the other is no likelier than the least alternative."""
    known = dict(found.top) | {found.token: found.logprob}
    other = no if found.token == yes else yes
    bound = min((logprob for _, logprob in found.top), default=found.logprob)
    odds = found.logprob - known.get(other, min(bound, found.logprob))
    return odds if found.token == yes else -odds


def _line(text: str) -> str:
    """A message in one line, so that it cannot look like another part of the prompt."""
    return " ".join(text.split())
