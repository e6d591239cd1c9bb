"""The served model as the API sees it: its names, tokenizer and chat template, and what the template supports."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from headrace.api.compile.pictures import PictureReader, SentImage
from headrace.api.compile.policies import NO_SHARING, PromptPolicy, Rules
from headrace.api.errors import ApiError, invalid, lost, model_not_found
from headrace.core.ports import Grammars
from headrace.service.adapters import KnownAdapters, NamedAdapter
from headrace.service.images import ImagesLost, ImageText, Placed
from headrace.service.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from headrace.service.service import Intake
from headrace.text.content import PromptText
from headrace.text.images import BadPicture
from headrace.text.infill import find_infill
from headrace.text.parsing.catalogue import AUTO, reasoning_format, tool_format
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat
from headrace.text.processes import TemplateStopped
from headrace.text.rendering import TemplateError
from headrace.text.stream import TextStreams
from headrace.text.template import PROBE, PROBE_MESSAGE, PROBE_TOOL, ChatTemplate
from headrace.text.tokenizer import Segments, Tokenizer

MAX_THREADS = 4
MAX_WAITING = 64
"""Requests of a tenant that wait for a template which they sent."""


ResultT = TypeVar("ResultT")


class _Lane:
    """The requests of one tenant: one runs, the others wait."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.requests = 0


class TemplateLanes:
    """Runs the work of each tenant one after the other, and that of different tenants in parallel."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="chat-template")

    async def run(self, tenant: str, work: Callable[[], ResultT], param: str) -> ResultT:
        """The result of ``work``. ``param`` is the field whose templates are rendered.

        Raises:
            ApiError: 429, too many requests of the tenant wait for templates that they sent.
        """
        lane = self._lanes.setdefault(tenant, _Lane())
        if param == "chat_template" and lane.requests > MAX_WAITING:
            raise ApiError(
                429,
                f"chat_template: {MAX_WAITING} requests of this tenant wait already for their templates.",
                type="rate_limit_error",
                param=param,
                code="rate_limit_exceeded",
                retry_after=1,
            )
        lane.requests += 1
        try:
            await lane.turn.acquire()
        except asyncio.CancelledError:
            self._leave(tenant, lane)
            raise
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # Its turn ends with the work, which goes on when the client has disconnected.
        running.add_done_callback(lambda _: self._end_turn(tenant, lane))
        return await asyncio.shield(running)

    def _end_turn(self, tenant: str, lane: _Lane) -> None:
        lane.turn.release()
        self._leave(tenant, lane)

    def _leave(self, tenant: str, lane: _Lane) -> None:
        lane.requests -= 1
        if not lane.requests:
            self._lanes.pop(tenant, None)


_KEY, _VALUE = "probe_key", "probe_value"


class Dialect:
    """The capabilities of a model's own template, and of templates in requests.

    Args:
        template: the model's template.
        tool_parser, reasoning_parser: names of formats, or ``auto``.

    Raises:
        UnknownParser: there is no such format.
    """

    def __init__(self, template: ChatTemplate, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self._template = template
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self.tools = lru_cache(maxsize=32)(self._tools)
        self.reasoning = lru_cache(maxsize=32)(self._reasoning)
        self.knows_tools = lru_cache(maxsize=32)(self._knows_tools)
        self.arguments_are_text = lru_cache(maxsize=32)(self._arguments_are_text)
        self.takes_several_calls = lru_cache(maxsize=32)(self._takes_several_calls)
        self.variables = lru_cache(maxsize=32)(template.variables)
        self.tools(None), self.reasoning(None), self.variables(None)
        self.knows_tools(None), self.takes_several_calls(None)  # now, since a probe may wait for a process

    def _tools(self, source: str | None) -> ToolFormat | None:
        """The format of calls in outputs of the template ``source`` (None: the model's own)."""
        return tool_format(self._tool_parser, self._text(source))

    def _reasoning(self, source: str | None) -> ReasoningFormat | None:
        """The format of reasoning in outputs of the template ``source``."""
        return reasoning_format(self._reasoning_parser, self._text(source))

    def _text(self, source: str | None) -> str:
        return "\n".join(self._template.sources) if source is None else source

    def _knows_tools(self, source: str | None) -> bool:
        """Whether the template shows tools to the model."""
        return PROBE in self._try(source, [PROBE_MESSAGE], [PROBE_TOOL])

    def _arguments_are_text(self, source: str | None) -> bool:
        """Whether the template expects the arguments of earlier calls as JSON text instead of an object."""
        if _KEY in self._try(source, _called({_KEY: _VALUE})):
            return False
        return _KEY in self._try(source, _called(f'{{"{_KEY}": "{_VALUE}"}}'))

    def _takes_several_calls(self, source: str | None) -> bool:
        """Whether the template accepts a message with more than one call; Llama 3's templates do not."""
        arguments: object = {_KEY: _VALUE}
        if self.arguments_are_text(source):
            arguments = f'{{"{_KEY}": "{_VALUE}"}}'
        return self._try(source, _called(arguments, arguments)).count(_KEY) > 1

    def _try(
        self,
        source: str | None,
        messages: list[Mapping[str, Any]],
        tools: list[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            return self._template.render(messages, template=source, tools=tools).text
        except TemplateStopped:
            if source is not None:
                raise
            return ""
        except TemplateError:
            return ""


def _called(*arguments: object) -> list[Mapping[str, Any]]:
    """A conversation with calls."""
    calls = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "f", "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return [PROBE_MESSAGE, {"role": "assistant", "content": "", "tool_calls": calls}]


class Named(NamedTuple):
    """A model or adapter: its name in answers, and the digest of the adapter (empty: the model itself)."""

    name: str
    adapter: str


class ServedModel:
    """What routes need to know about the served model.

    Args:
        name: its name in the API.
        tokenizer, template: convert text and conversations to tokens.
        max_model_len: maximum tokens of one sequence, prompt plus output.
        vocab_size: number of token ids.
        source: where it was loaded from; part of the fingerprint, never shown.
        also_named: further names that requests may use and that are listed.
        aliases: names that requests may use and that are not listed.
        rules: what requests may ask of the scheduler; replaced when tenants are reloaded.
        stream_interval: tokens per chunk of a stream, after the first.
        grammars: compile constraints of structured outputs; without them such a request is rejected.
        cost: returns the cost of engine requests by their ids, as fields of ``usage``; None without prices.
        prompts: what happens with prompts before they are submitted.
        trust_request_chat_template: render the templates of requests.
        defaults: sampling parameters of requests that give none.
        dialect: how the template offers tools and how outputs are parsed (default: by the template's text).
    """

    images: ImageText | None = None
    """Places images in prompts, if the model takes some."""
    no_images = "the model takes text only"
    """Why it takes none."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        max_model_len: int,
        vocab_size: int,
        source: str = "",
        rules: Rules | None = None,
        stream_interval: int = 1,
        dialect: Dialect | None = None,
        also_named: Sequence[str] = (),
        aliases: Sequence[str] = (),
        grammars: Grammars | None = None,
        cost: Callable[[Iterable[str]], Mapping[str, Any]] | None = None,
        prompts: PromptPolicy | None = None,
        trust_request_chat_template: bool = False,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.name = name
        self.names = (name, *also_named)
        self._accepted = frozenset({*self.names, *aliases})
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.rules = rules or Rules()
        self.defaults = defaults
        self.stream_interval = stream_interval
        self.grammars = grammars
        self.cost = cost
        self.prompts = prompts or PromptPolicy()
        self.dialect = dialect or Dialect(template)
        self.trust_request_chat_template = trust_request_chat_template
        self.template_lanes, self.pictures = TemplateLanes(), PictureReader()
        self.adapters: KnownAdapters | None = None
        """The adapters of this model, if it may have some."""
        self.sharing = NO_SHARING
        """This server's part in KV transfer with other servers."""
        self.streams = TextStreams(tokenizer)
        self.intake = Intake()
        self._special = {
            token: text for token in tokenizer.special_token_ids if (text := tokenizer.token(token))
        }
        self.tokens_of = lru_cache(maxsize=64)(self._tokens_of)
        self.infill = find_infill(tokenizer)
        self._segments = Segments(tokenizer)
        self._encode_seconds = 0.0
        self.created = int(time.time())
        described = f"{name} {source} {max_model_len} {vocab_size}"
        self.fingerprint = "fp_" + hashlib.sha256(described.encode()).hexdigest()[:10]
        self.card = {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": name,
            "parent": None,
            "max_model_len": max_model_len,
        }

    def adapter_cards(self) -> list[AdapterCard]:
        """The adapters as ``/v1/models`` lists them."""
        return [AdapterCard(each, self) for each in self.adapters or ()]

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` 404 unless ``asked`` names this model or one of its adapters, or is None."""
        self.named(asked)

    def named(self, asked: str | None) -> Named:
        """What ``asked`` names: this model, or one of its adapters.

        Raises:
            ApiError: 404, it names neither.
        """
        if asked is None or asked in self._accepted:
            return Named(self.name, "")
        found = self.adapters.find(asked) if self.adapters is not None else None
        if found is None:
            raise model_not_found(asked)
        return Named(found.name, found.digest)

    def _tokens_of(self, markers: frozenset[str]) -> frozenset[int]:
        """The special tokens that are part of one of ``markers``."""
        return frozenset(
            token for token, text in self._special.items() if any(text in marker for marker in markers)
        )

    def check_tokens(self, tokens: list[int] | tuple[int, ...], param: str) -> None:
        """Raise `ApiError` 400 unless all ids exist."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise invalid(f"{param} has the token id {wrong}; ids are 0 to {self.vocab_size - 1}", param)

    def check_text(self, tokens: Sequence[int], param: str | None) -> None:
        """Raise `ApiError` 400 if a text has tokens that only the tokenizer has, not the model."""
        why = self.tokenizer.why_unreadable(tokens, self.vocab_size)
        if why is not None:
            raise invalid(why if param is None else f"{param}: {why}", param)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of ``text``; a long text does not block the event loop."""
        return (await self.encode_batch([text], add_special_tokens))[0]

    async def encode_prompt(
        self, prompt: PromptText, add_special_tokens: bool = False, scope: str | None = None
    ) -> list[int]:
        """The tokens of a rendered prompt. With a ``scope``, long parts that it has sent before are cached."""
        if prompt.quoted:
            work = partial(self._timed, self.tokenizer.encode_prompt, prompt, add_special_tokens)
            return work() if self.tokenizer.is_short(len(prompt.text)) else await asyncio.to_thread(work)
        if add_special_tokens or scope is None:
            return await self.encode(prompt.text, add_special_tokens)
        parts = self._segments.cut(prompt.text, scope)
        missing = [part.text for part in parts if part.tokens is None]
        tokenized = await self.encode_batch(missing, add_special_tokens=False) if missing else []
        return self._segments.join(parts, tokenized, scope)

    def check_images(self, sent: Sequence[SentImage]) -> None:
        """Raise `ApiError` 400 if a request has images that this model does not take, or too many."""
        if sent and self.images is None:
            path = f"{sent[0].place}.type"
            why = f"images are not supported yet: {self.no_images}"
            raise invalid(f"{path}: {why}", path, "unsupported_parameter")
        self.pictures.check(sent)

    async def place(self, tokens: Sequence[int], sent: Sequence[SentImage], scope: str) -> Placed:
        """The tokens of a prompt, in which the placeholders of the images ``sent`` have been replaced.

        Only requests of the same ``scope`` (a tenant and its ``cache_salt``) share encoded images.

        Raises:
            ApiError: an image cannot be used.
        """
        if self.images is None:
            raise AssertionError("images were not refused")
        try:
            return await self.images.place(tokens, await self.pictures.read(sent), scope)
        except ImagesLost as error:
            raise lost(str(error)) from None
        except BadPicture as error:
            if error.index is None:
                raise invalid(f"messages: {error}", "messages", "invalid_image") from None
            raise sent[error.index].refused(str(error)) from None

    async def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The tokens of each text; long or many texts do not block the event loop."""
        # see docs/decisions/background-work.md#tokenizing-short-texts
        work = partial(self._timed, self.tokenizer.encode_batch, texts, add_special_tokens)
        short = self.tokenizer.is_short(sum(map(len, texts)))
        return work() if short else await asyncio.to_thread(work)

    def _timed(self, encode: Callable[[Any, bool], ResultT], given: Any, add_special_tokens: bool) -> ResultT:
        began = time.perf_counter()
        try:
            return encode(given, add_special_tokens)
        finally:
            self._encode_seconds += time.perf_counter() - began

    def text_seconds(self) -> Mapping[str, float]:
        """Seconds spent so far on turning text into tokens and tokens into text."""
        return {"tokenize": self._encode_seconds, "detokenize": self.streams.seconds}

    def token_text(self, token: int) -> str:
        """The text of one token; an incomplete character becomes a replacement character."""
        return self.streams.token_bytes(token).decode("utf-8", "replace")


class AdapterCard:
    """An adapter in ``/v1/models``, with the model as its ``parent``."""

    def __init__(self, adapter: NamedAdapter, model: ServedModel) -> None:
        self.name = adapter.name
        self.names = (adapter.name,)
        self.max_model_len = model.max_model_len
        self.created = adapter.created
        self.card = model.card | {
            "id": adapter.name,
            "created": adapter.created,
            "root": adapter.path,
            "parent": model.name,
        }

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` 404 unless ``asked`` names this adapter or is None."""
        if asked is not None and asked != self.name:
            raise model_not_found(asked)
