"""Describes the prompt of a chat call for its explanation; details are computed only on demand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from headrace.api.model import ServedModel
from headrace.api.openai.chat_wire import Conversation
from headrace.api.prompts.normalize import Applied, described, header
from headrace.api.prompts.outline import Outline
from headrace.api.prompts.policy import About


def about_chat(
    model: ServedModel, body: Conversation, text: str, tokens: Sequence[int], done: Sequence[Applied]
) -> About:
    """The description of a conversation's prompt ``text`` and its ``tokens``."""
    outline = Outline(text, body, model.dialect.reasoning(body.chat_template), model.tokenizer)
    tools = tuple(hash(json.dumps(tool.plain(), sort_keys=True)) for tool in body.tools or ())
    return About(partial(outline.place, tokens), tools, tuple(described(done)), tuple(header(done).items()))
