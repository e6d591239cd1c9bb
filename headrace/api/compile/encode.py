"""Stage 2 of compiling a request: prompts as tokens, the length of outputs, and the parts that are retained longer.

Next: `constrain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.api.compile.bodies import ChatBody, CompletionBody, Conversation
from headrace.api.compile.draft import AnyDraft, ChatDraft, Encoded, TextDraft
from headrace.api.compile.fields import Generation
from headrace.api.compile.model import ServedModel
from headrace.api.compile.normalization import normalized
from headrace.api.compile.outline import Outline
from headrace.api.compile.pictures import sent_images
from headrace.api.compile.policies import MARKED_RETENTION
from headrace.api.compile.render import UNLIMITED, render
from headrace.api.errors import ApiError, context_length_exceeded, invalid, prompt_too_long, text_too_long
from headrace.core.request import Retention
from headrace.service.images import Placed

MAX_MARKS = 4
"""As many as Anthropic allows; each costs rendering and tokenizing its part of the conversation again."""


async def encode_chat(draft: ChatDraft) -> None:
    """Tokenize a rendered conversation.

    Raises:
        ApiError: it does not fit into the context, or one of its fields does not.
    """
    body, model = draft.body, draft.model
    _check_length(draft.text.text, draft)
    whole = await model.encode_prompt(draft.text, bool(body.add_special_tokens), draft.scope)
    placed = await _placed(draft, whole) if draft.images else None
    tokens = truncated(whole, body, model, draft.length.reserved) if placed is None else [*placed.tokens]
    if draft.shorten and draft.length.asked is not None:
        room = _room(len(tokens), model.max_model_len)
        draft.length = draft.length._replace(asked=min(draft.length.asked, room))
    outline = Outline(draft.text.text, body, draft.facts.reasoning, model.tokenizer)
    draft.encoded = [
        Encoded(
            tuple(tokens),
            _output_length(draft, len(tokens)),
            retention=await _marked(draft, whole if placed else tokens, placed),
            prediction=await _predicted(model, body),
            about=outline.about(tokens, draft.normalized),
            images=placed.images if placed else (),
        )
    ]


async def encode_texts(draft: TextDraft) -> None:
    """Tokenize the prompts of a text completion.

    Raises:
        ApiError: one does not fit into the context, or ``suffix`` cannot be used.
    """
    body, model, encoded = draft.body, draft.model, list[Encoded]()
    pieces = model.intake.pieces()
    for given, full in zip(body.prompts(), await _tokens(draft), strict=True):
        tokens = truncated(full, body, model, draft.length.reserved)
        await pieces.turn()
        echo = ""
        if body.echo:
            whole = isinstance(given, str) and len(tokens) == len(full)
            echo = str(given) if whole else model.tokenizer.decode(tokens)
        encoded.append(Encoded(tuple(tokens), _output_length(draft, len(tokens)), echo))
    draft.encoded = encoded


async def conversation_tokens(model: ServedModel, body: Conversation, tenant_name: str) -> list[int]:
    """The tokens of a conversation's prompt, as stages 1 and 2 make them for a request of a tenant.

    Raises:
        ApiError: the conversation cannot be rendered.
    """
    sent = sent_images(body)
    model.check_images(sent)
    body, _ = normalized(body, model.prompts.markers(model.rules.tenants, tenant_name))
    special = isinstance(body, ChatBody) and bool(body.add_special_tokens)
    tokens = await model.encode_prompt(await render(model, body, tenant_name), special)
    return [*(await model.place(tokens, sent, f"{tenant_name}\0")).tokens] if sent else tokens


async def _placed(draft: ChatDraft, tokens: Sequence[int]) -> Placed:
    """The prompt with its images, which take long to encode: they are given up when the client disconnects."""
    return await draft.caller.while_connected(draft.model.place(tokens, draft.images, draft.scope))


def _check_length(text: str, draft: AnyDraft) -> None:
    """Raise `ApiError` 400 for a text that cannot fit into the context; only its tokens show that others do not.

    With ``shorten``, in the words that Anthropic's clients look for.
    """
    fewest, limit = draft.model.tokenizer.fewest(text), draft.model.max_model_len
    if fewest > limit and draft.body.truncate_prompt_tokens is None:
        raise prompt_too_long(fewest, limit) if draft.shorten else text_too_long(fewest, limit)


def truncated(tokens: list[int], body: Generation, model: ServedModel, answer: int) -> list[int]:
    """``truncate_prompt_tokens`` tokens of a prompt, without ``truncation_side`` the last ones.

    -1: as many as leave room for ``answer`` tokens.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == 0:
        raise invalid("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
    if keep == -1:
        keep = max(1, model.max_model_len - max(1, answer))
    return tokens[:keep] if body.truncation_side == "right" else tokens[-keep:]


def _output_length(draft: AnyDraft, prompt: int) -> int | None:
    """The maximum output tokens of a prompt of ``prompt`` tokens; None if neither client nor server limits them."""
    asked, param, default, _ = draft.length
    most = draft.model.defaults.most_tokens
    length = answer_length(prompt, asked, default, param, draft.model.max_model_len, most)
    return None if asked is None and default is None and most is None else length


def answer_length(
    prompt: int, asked: int | None, default: int | None, param: str, limit: int, most: int | None = None
) -> int:
    """The maximum output tokens for a prompt of ``prompt`` tokens.

    ``asked`` is the value of the field ``param``; if it is None, ``default`` applies. `UNLIMITED`, and a ``default`` of
    None, mean all that the context leaves. The result is at most ``most``, if that is given.

    Raises:
        ApiError: prompt and output together exceed ``limit``.
    """
    room = limit - prompt
    if asked is None or asked == UNLIMITED:
        if room < 1:
            raise context_length_exceeded(prompt, 1, limit, None)
        length = room if default is None or asked == UNLIMITED else min(default, room)
        return length if most is None else min(length, most)
    if asked < 1:
        raise invalid(
            f"{param} must be at least 1, or -1 for all that the context leaves, got {asked}", param
        )
    if asked > room:
        raise context_length_exceeded(prompt, asked, limit, param)
    return asked if most is None else min(asked, most)


def _room(prompt: int, limit: int) -> int:
    """The tokens that the context leaves for the output of a prompt of ``prompt`` tokens.

    Raises:
        ApiError: it leaves none.
    """
    if prompt >= limit:
        raise prompt_too_long(prompt, limit)
    return limit - prompt


async def _marked(draft: ChatDraft, tokens: list[int], placed: Placed | None) -> tuple[Retention, ...]:
    """The retentions that ``cache_control`` asks for: each from the prompt's beginning to the end of its message.

    ``placed`` is the prompt if images have been placed in ``tokens``.
    """
    marks = [
        (number, mark)
        for number, message in enumerate(draft.body.messages, start=1)
        if (mark := message.mark()) is not None
    ]
    if len(marks) > MAX_MARKS:
        raise invalid(f"at most {MAX_MARKS} messages may have cache_control, got {len(marks)}", "messages")
    retentions = []
    for number, mark in marks:
        end = await _end_of(draft, number, tokens)
        if placed is not None:
            before = sum([len(message.images()) for message in draft.body.messages[:number]])
            end += _growth(tokens, placed, before)
        retentions.append(Retention(0, end, MARKED_RETENTION, mark.seconds))
    return tuple(retentions)


def _growth(tokens: list[int], placed: Placed, images: int) -> int:
    """The tokens that the first ``images`` of a prompt have added; each adds the same number beside its positions."""
    added = [span.length - 1 for span in placed.images]
    beside = (len(placed.tokens) - len(tokens) - sum(added)) // len(added)
    return sum(added[:images]) + images * beside


async def _end_of(draft: ChatDraft, messages: int, tokens: list[int]) -> int:
    """The number of prompt tokens of its first ``messages``; all tokens if these cannot be rendered alone."""
    body, model = draft.body, draft.model
    if messages == len(body.messages):
        return len(tokens)
    changes = {
        "messages": body.messages[:messages],
        "add_generation_prompt": False,
        "continue_final_message": None,
    }
    try:
        opened = await render(model, body.model_copy(update=changes), draft.tenant, draft.facts)
    except ApiError:  # a template may require alternating turns, or a user's at the end
        return len(tokens)
    known = await model.encode_prompt(opened, bool(body.add_special_tokens))
    same = min(len(known), len(tokens))
    return next((at for at, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), same)


async def _predicted(model: ServedModel, body: ChatBody) -> tuple[int, ...]:
    """The tokens of the output that the client expects; none without ``prediction``."""
    if body.prediction is None:
        return ()
    tokens = await model.encode(body.prediction.text(), False)
    if len(tokens) > model.max_model_len:
        message = f"prediction.content has {len(tokens)} tokens; the maximum context length is {model.max_model_len}"
        raise invalid(message, "prediction.content")
    return tuple(tokens)


async def _tokens(draft: TextDraft) -> list[list[int]]:
    """The tokens of each prompt; the prompts are either all text or all token ids."""
    body, model = draft.body, draft.model
    if body.suffix:
        return await _infilled(model, body, body.suffix)
    prompts = body.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        _check_length(text, draft)
    if texts:
        return await model.encode_batch(texts, body.add_special_tokens is not False)
    given = [prompt for prompt in prompts if not isinstance(prompt, str)]
    pieces = model.intake.pieces()
    for tokens in given:
        model.check_tokens(tokens, "prompt")
        await pieces.turn()
    return given


async def _infilled(model: ServedModel, body: CompletionBody, suffix: str) -> list[list[int]]:
    """The tokens that ask for the text between each prompt and ``suffix``.

    Raises:
        ApiError: the tokenizer has no tokens for fill-in-the-middle, or another field contradicts ``suffix``.
    """
    if model.infill is None:
        message = "suffix: the tokenizer of this model has no tokens for fill-in-the-middle"
        raise invalid(message, "suffix", "unsupported_parameter")
    if body.echo:
        raise invalid("echo and suffix cannot be used together", "suffix")
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens and suffix cannot be used together", "suffix")
    prompts, special = body.prompts(), body.add_special_tokens is not False
    for prompt in prompts:
        if not isinstance(prompt, str):
            model.check_tokens(prompt, "prompt")
    make = model.infill.prompt
    if model.tokenizer.is_short(len(suffix) + sum(map(len, prompts))):
        return [make(prompt, suffix, special) for prompt in prompts]
    return await asyncio.to_thread(lambda: [make(prompt, suffix, special) for prompt in prompts])
