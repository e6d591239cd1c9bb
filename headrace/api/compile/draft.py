"""A request while it is compiled: what the client sent, and what each stage adds.

```
 door         body, model, caller
 1 render     facts, text, opened                      render.py
 2 encode     encoded: tokens, length, retention       encode.py
 3 constrain  prompts: with sampling and constraint    constrain.py
 4 submit     requests of the engine, submitted        submit.py
```
`submit` runs them in this order. A fact that several stages need is found out once, and stands here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from headrace.api.compile.bodies import CallRule, ChatBody, CompletionBody
from headrace.api.compile.call import Prompt
from headrace.api.compile.fields import Generation
from headrace.api.compile.markers import Action
from headrace.api.compile.model import Named, ServedModel
from headrace.api.compile.pictures import SentImage
from headrace.api.compile.policies import UNKNOWN, About
from headrace.api.exchange import Caller
from headrace.core.images import ImageSpan
from headrace.core.request import SEED_BITS, Retention
from headrace.response_cache.query import Turn, no_turn
from headrace.text.content import PromptText
from headrace.text.parsing.catalogue import PLAIN_JSON
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat

BodyT = TypeVar("BodyT", bound=Generation)


class Facts(NamedTuple):
    """What a conversation's template and tools say: which calls it may have, and how calls and reasoning are written.

    ``calls`` is None if the template shows no known format of calls.
    """

    rule: CallRule
    calls: ToolFormat | None
    reasoning: ReasoningFormat | None

    @property
    def written(self) -> ToolFormat | None:
        """The format of calls: the model's, or plain JSON where a grammar forces a model that has none."""
        return PLAIN_JSON if self.calls is None and self.rule.forced else self.calls


class Applied(NamedTuple):
    """A per-request marker, what was done with it, and how many ``times`` it was found."""

    marker: str
    action: Action
    times: int


class Length(NamedTuple):
    """What a request says about its output's length: the field ``param`` has the value ``asked``.

    If that is None, ``default`` applies (None: all that the context leaves). A prompt that is truncated to fit leaves
    ``reserved`` tokens.
    """

    asked: int | None
    param: str
    default: int | None
    reserved: int


class Encoded(NamedTuple):
    """One prompt as tokens, and the maximum length of its output; the other fields are those of `call.Prompt`."""

    tokens: tuple[int, ...]
    max_tokens: int | None
    echo: str = ""
    retention: tuple[Retention, ...] = ()
    prediction: tuple[int, ...] = ()
    about: About = UNKNOWN
    images: tuple[ImageSpan, ...] = ()


@dataclass(slots=True)
class Draft(Generic[BodyT]):
    """A request between its door and the engine.

    ``id_prefix`` begins the call's id. ``reports_begin``: the call reports its first token too, without a stream.
    ``shorten`` reduces the output's length to what the context leaves, instead of refusing the request.
    """

    body: BodyT
    model: ServedModel
    caller: Caller
    request_timeout: float
    id_prefix: str
    shorten: bool = False
    reports_begin: bool = False
    tenant: str = field(init=False)
    """The tenant that the call is accounted to."""
    scope: str = field(init=False)
    """The partition of the prefix cache: calls of one tenant with equal ``cache_salt`` share prefixes."""
    call_id: str = field(init=False)
    named: Named = field(init=False)
    """What the request names: the model, or an adapter as it is now."""
    seed: int = field(init=False)
    """The client's seed, or a random one."""
    length: Length = field(init=False)
    logprobs: int | None = None
    """The number of alternatives per token; None: no log-probabilities."""
    encoded: Sequence[Encoded] = ()
    prompts: Sequence[Prompt] = ()
    choices_per_prompt: int = 1
    turn: Callable[[], Turn | None] = no_turn
    """Finds the last user message, for the semantic cache."""

    def __post_init__(self) -> None:
        self.tenant = self.caller.tenant(self.body.user)
        self.scope = f"{self.tenant}\0{self.body.cache_salt or ''}"
        self.call_id = f"{self.id_prefix}{self.body.request_id or secrets.token_hex(12)}"
        self.named = self.model.named(self.body.model)
        self.seed = secrets.randbits(SEED_BITS) if self.body.seed is None else self.body.seed


@dataclass(slots=True)
class ChatDraft(Draft[ChatBody]):
    """A conversation. ``opened``: the prompt has opened the reasoning. ``normalized``: what was done with markers.
    ``images`` are those that the client sent.
    """

    facts: Facts = field(init=False)
    text: PromptText = field(init=False)
    opened: bool = False
    normalized: tuple[Applied, ...] = ()
    images: tuple[SentImage, ...] = ()


@dataclass(slots=True)
class TextDraft(Draft[CompletionBody]):
    """Texts, or tokens, to continue. ``mute``: only the prompts' log-probabilities are wanted."""

    mute: bool = False


AnyDraft = ChatDraft | TextDraft
