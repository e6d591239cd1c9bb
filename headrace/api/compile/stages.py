"""Compiles a request in four stages, from a typed body to a call whose requests the engine has.

```
 door (openai, responses, anthropic, batch, warming)    its own wire types → ChatBody or CompletionBody
 1 render      messages and tools → text
 2 encode      → tokens, lengths
 3 constrain   schema, grammar, tool choice → sampling parameters
 4 submit      class, deadline, tenant, cache scope → requests, looked up and submitted
```
Each stage reads and completes the `Draft`, and is one file. The call's events go back to the same door.
"""

from __future__ import annotations

from headrace.api.caller import Caller
from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.compile.call import Answers, Call
from headrace.api.compile.constrain import constrain
from headrace.api.compile.draft import ChatDraft, TextDraft
from headrace.api.compile.encode import conversation_tokens, encode_chat, encode_texts
from headrace.api.compile.model import ServedModel
from headrace.api.compile.render import check_choice, facts_of, prepare_texts, render_chat
from headrace.api.compile.submit import submit


async def open_chat(
    answers: Answers,
    model: ServedModel,
    body: ChatBody,
    caller: Caller,
    request_timeout: float,
    id_prefix: str = "chatcmpl-",
    shorten: bool = False,
    reports_begin: bool = False,
) -> Call:
    """Compile and submit a conversation. ``answers`` as in `call.Answers`; the other parameters are those of `Draft`.

    Raises:
        ApiError: the request is invalid, or the server rejects it.
        InvalidParameter: a value is outside its range.
    """
    draft = ChatDraft(body, model, caller, request_timeout, id_prefix, shorten, reports_begin)
    await render_chat(draft)
    await encode_chat(draft)
    await constrain(draft)
    return await submit(answers, draft)


async def open_completion(
    answers: Answers, model: ServedModel, body: CompletionBody, caller: Caller, request_timeout: float
) -> Call:
    """Compile and submit texts to continue.

    Raises:
        ApiError: the request is invalid, or the server rejects it.
        InvalidParameter: a value is outside its range.
    """
    draft = TextDraft(body, model, caller, request_timeout, "cmpl-")
    prepare_texts(draft)
    await encode_texts(draft)
    await constrain(draft)
    return await submit(answers, draft)


async def count_chat(model: ServedModel, body: ChatBody, caller: Caller) -> int:
    """The number of tokens of a conversation's prompt, as `open_chat` makes it.

    Raises:
        ApiError: the conversation cannot be rendered.
    """
    check_choice(model.dialect, body, facts_of(model.dialect, body))
    return len(await conversation_tokens(model, body, caller.tenant(body.user)))
