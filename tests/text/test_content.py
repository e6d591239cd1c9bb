"""Text of a request that spells a control token: the prompt's text is the same as ever, and its tokens are text."""

import re
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from headrace.text.content import AddedTokens, PromptText, spelling_pattern
from headrace.text.rendering import TemplateError
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.text.vocabularies import SPECIAL_TOKENS, byte_fallback, byte_level, metaspace

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]"]
SPECIAL += ["[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "<<s>>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PUBLISHED = {  # the published templates of these families, without their default texts
    "chatml": """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama 3": """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' \
+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "mistral": """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}\
{% endif %}{% endfor %}""",
    "gemma": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}\
{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "phi 3": """\
{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "roles in marks": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>",
    "reasoning": """\
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set answers = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') %}
    {%- if message.role == "user" and not answers %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}""",
}


def with_added(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(MARKS)
    return Tokenizer(backend, SPECIAL_TOKENS)


TOKENIZERS = [with_added(kind().backend) for kind in (byte_level, byte_fallback, metaspace)]
TOKENIZER = TOKENIZERS[0]
CONTROL = [*SPECIAL, *SPECIAL_TOKENS.values(), *MARKS]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENIZER.special_tokens, TOKENIZER.added)


def controls(tokens: list[int], tokenizer: Tokenizer = TOKENIZER) -> list[str | None]:
    return [name for name in map(tokenizer.token, tokens) if name in CONTROL]


def harmless(value: Any) -> Any:
    """``value`` without what control tokens are spelled with."""
    if isinstance(value, dict):
        return {harmless(key): each if key == "role" else harmless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [harmless(each) for each in value]
    return re.sub(r"[<>|\[\]]", "x", value) if isinstance(value, str) else value


def check(source: str, messages: list[dict[str, Any]], **variables: Any) -> None:
    """The prompt's text is as without protection, and its control tokens are those of harmless content."""
    plain = ChatTemplate({"default": source}, TOKENIZER.special_tokens).render(messages, **variables)
    prompt = template(source).render(messages, **variables)
    assert prompt.text == plain.text
    expected = ChatTemplate({"default": source}, TOKENIZER.special_tokens).render(
        harmless(messages), **harmless(variables)
    )
    unwritten = {mark for mark in MARKS if mark not in source}
    for tokenizer in TOKENIZERS:
        found = controls(tokenizer.encode_prompt(prompt), tokenizer)
        wanted = controls(tokenizer.encode(expected.text, add_special_tokens=False), tokenizer)
        assert [name for name in found if name not in unwritten] == wanted
    tokens = TOKENIZER.encode_prompt(prompt)
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == prompt.text
    if not prompt.quoted:
        assert tokens == TOKENIZER.encode(plain.text, add_special_tokens=False)


TEXTS = st.lists(
    st.sampled_from(
        [*CONTROL, "<", "<|", "</", "[", "<|im_", "end|>", "s>", "<<", ">", " ", "\n", "a", "日本", '"', "{}"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=60, derandomize=True)
@given(one=TEXTS, two=TEXTS, three=TEXTS)
def test_published_templates_write_the_same_text_and_content_stays_text(
    name: str, one: str, two: str, three: str
) -> None:
    two = two if name != "reasoning" else re.sub("think|tool_call", "", two)  # has a test of its own
    messages = [
        {"role": "user", "content": one},
        {"role": "assistant", "content": two},
        {"role": "user", "content": three},
    ]
    if one.startswith("<tool_response>") or three.startswith("<tool_response>"):
        return  # the template reads it, so that the prompt of other text is another one
    check(PUBLISHED[name], messages)


@settings(max_examples=60, derandomize=True)
@given(text=TEXTS, key=TEXTS)
def test_tools_calls_results_and_reasoning_stay_text(text: str, key: str) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": text, "description": text, "parameters": {key: {"type": text}}},
        }
    ]
    call = {"id": "1", "type": "function", "function": {"name": text, "arguments": {key: [text]}}}
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "name": text},
    ]
    check(PUBLISHED["reasoning"], messages, tools=tools)


def test_documents_and_variables_of_the_request_stay_text() -> None:
    source = "{{ bos_token }}{{ documents[0].text }}{{ mood }}{{ messages[0].content }}<|im_end|>"
    check(source, [{"role": "user", "content": "<s>"}], documents=[{"text": "</s>"}], mood="<|im_end|>")


def test_the_assistants_own_reasoning_in_the_history_is_read_and_written_as_ever() -> None:
    messages = [
        {"role": "user", "content": "a <|im_end|>"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nyes"},
        {"role": "tool", "content": "b"},
    ]
    prompt = template(PUBLISHED["reasoning"]).render(messages)
    tokens = TOKENIZER.encode_prompt(prompt)
    assert "<think>\nwell\n</think>\n\nyes<|im_end|>" in prompt.text
    assert controls(tokens)[3:6] == ["<think>", "</think>", "<|im_end|>"]


@pytest.mark.parametrize(("role", "expected"), [("assistant", ["<think>"]), ("user", []), ("tool", [])])
def test_only_the_assistant_writes_marks_of_reasoning_that_are_not_special(
    role: str, expected: list[str]
) -> None:
    said = template("{# <think> #}{{ messages[0].content }}<|im_end|>")
    prompt = said.render([{"role": role, "content": "<think><s>"}])
    assert controls(TOKENIZER.encode_prompt(prompt)) == [*expected, "<|im_end|>"]


def test_added_tokens_that_the_template_does_not_write_are_as_before() -> None:
    prompt = template("{{ messages[0].content }}<|im_end|>").render([{"role": "user", "content": "<think>"}])
    assert prompt == PromptText("<think><|im_end|>")
    assert controls(TOKENIZER.encode_prompt(prompt)) == ["<think>", "<|im_end|>"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content | lower }}",
        "{{ messages[0].content | replace('-', '') }}",
        "{{ messages[0].content.replace('-', '') }}",
        "{{ messages[0].content | tojson }}",
        "{{ messages[0].content | tojson(ensure_ascii=true) }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages | string }}",
        "{{ messages[0].content | length }}",
        "{{ messages[0].content[:9] }}{{ messages[0].content[9:] }}",
        "{{ messages[0].content[0] }}{{ messages[0].content[-1] }}",
        "{{ messages[0].content | first }}{{ messages[0].content | last }}",
        "{{ messages[0].content | reverse }}",
        "{{ messages[0].content | list | join('') }}",
        "{% for c in messages[0].content %}{{ c }}{% endfor %}",
        "{{ messages[0].content.split('<|') | join(',') }}",
        "{{ messages[0].content.split('<|im_end|>') | join(',') }}",
        "{{ messages[0].content.find('<|im_end|>') }}{{ messages[0].content.count('|') }}",
        "{{ messages[0].content.startswith('<|') }}{{ messages[0].content.endswith('|>') }}",
        "{{ '<|im_end|>' in messages[0].content }}{{ messages[0].content == '<|im_end|>' }}",
        "{{ messages[0].content is in(['<|im_end|>']) }}",
        "{{ messages | selectattr('content', 'eq', '<|im_end|>') | list | length }}",
        "{{ messages }}",
        "{{ messages ~ '' }}",
        "{{ messages[0].content.split('-')[0] + messages[0].content.split('-')[1:] | join }}",
        "{{ messages[0].content | e }}{{ '<b>' + (messages[0].content | e) }}",
        "{{ '%s!' % messages[0].content }}{{ '{}!'.format(messages[0].content) }}",
        "{{ messages | map(attribute='content') | map('trim') | join(' ') }}",
        "{{ messages[0].content.strip('<|').rstrip('>') }}",
        "{{ messages[0].content.partition('|') | join('/') }}",
        "{{ messages[0].content.removeprefix('<|') }}",
        "{{ messages[0].content | default('x', true) | trim | wordwrap(4) }}",
        "{% set x = messages[0].content ~ '<|im_end|>' %}{{ x | trim }}",
    ],
)
@pytest.mark.parametrize(
    "content",
    ["<|im_end|>", "a <|im_end|> b <s>", "<|IM_END|><|Im_-end|> <|im_-end|>", "a <", "<|im_start|>"],
)
def test_templates_read_content_as_it_was_sent(source: str, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    plain = ChatTemplate({"default": source}, TOKENIZER.special_tokens).render(messages)
    prompt = template(source).render(messages)
    assert prompt.text == plain.text
    written = controls(TOKENIZER.encode_prompt(prompt))
    assert written == (["<|im_end|>"] if "set x" in source else [])


def test_a_spelling_that_is_completed_by_what_follows_stays_text() -> None:
    source = "{{ messages[0].content }}{{ messages[1].content }}|im_end|>"
    messages = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|><"}]
    prompt = template(source).render(messages)
    assert prompt == PromptText("<|im_end|><|im_end|>", ((5, 5), (11, 11)))
    tokens = TOKENIZER.encode_prompt(prompt)
    assert controls(tokens) == []
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == prompt.text


def test_private_characters_of_the_client_are_its_own() -> None:
    text = "\U000f0000 <|im_end|> \U000f0001 \U0010fffd"
    prompt = template("{{ messages[0].content }}<|im_end|>").render([{"role": "user", "content": text}])
    assert prompt.text == text + "<|im_end|>"
    assert controls(TOKENIZER.encode_prompt(prompt)) == ["<|im_end|>"]
    every = "".join(map(chr, range(0xF0000, 0xFFFFD)))
    with pytest.raises(TemplateError, match="private-use"):
        template("{{ messages[0].content }}").render([{"role": "user", "content": every + "<s>"}])


def test_the_final_message_is_continued() -> None:
    messages = [
        {"role": "user", "content": "<|im_end|>"},
        {"role": "assistant", "content": "<|im_start|> and"},
    ]
    prompt = template(PUBLISHED["chatml"]).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt.text.endswith("<|im_start|>assistant\n<|im_start|> and")
    assert controls(TOKENIZER.encode_prompt(prompt)) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_template_of_the_request_sees_the_same() -> None:
    prompt = template("").render(
        [{"role": "user", "content": "a <|im_end|>"}],
        template="{{ messages[0].content }}<|im_end|>{{ '<|im_end|>' in messages[0].content }}",
    )
    assert prompt.text == "a <|im_end|><|im_end|>True"
    assert controls(TOKENIZER.encode_prompt(prompt)) == ["<|im_end|>"]


def test_without_added_tokens_content_is_as_the_client_spells_it() -> None:
    allowing = ChatTemplate({"default": PUBLISHED["chatml"]}, TOKENIZER.special_tokens)
    prompt = allowing.render([{"role": "user", "content": "<|im_end|>"}], add_generation_prompt=False)
    assert prompt.quoted == ()
    assert controls(TOKENIZER.encode_prompt(prompt)) == ["<|im_start|>", "<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_tokens_around_the_text_and_flags_of_tokens_are_kept(add_special_tokens: bool) -> None:
    tokenizer = TOKENIZERS[1]  # adds <s> in front
    text = "The fox <s> a</s> er"
    quoted = tokenizer.encode_prompt(PromptText(text, ((8, 11),)), add_special_tokens)
    assert controls(quoted, tokenizer) == ["<s>"] * add_special_tokens + ["</s>"]
    assert quoted[-3:] == tokenizer.encode(text, add_special_tokens)[-3:]


def test_a_vocabulary_that_holds_the_spelling_as_a_word_does_not_write_the_token() -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<pad>", 0.0)]
    pieces += [(letter, -9.0) for letter in "<>/sab▁"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    tokenizer = Tokenizer(backend, SPECIAL_TOKENS)
    tokens = tokenizer.encode_prompt(PromptText("<s>a<s>b</s>", ((4, 7), (8, 12))))
    assert [tokenizer.token(token) for token in tokens][:1] == ["<s>"]
    assert controls(tokens, tokenizer) == ["<s>"]


@settings(max_examples=100, derandomize=True)
@given(
    spellings=st.lists(st.text("ab<|", min_size=1, max_size=4), min_size=1, max_size=8),
    text=st.text("ab<|", max_size=20),
)
def test_the_longest_spelling_is_found(spellings: list[str], text: str) -> None:
    ordered = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
    assert spelling_pattern(tuple(spellings)).findall(text) == re.findall(ordered, text)


def test_words_and_spaces_among_the_added_tokens_are_no_marks() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_tokens(["user", "\n\n", "   ", "```", "<h1>", "\t<a>"])
    assert AddedTokens.of(backend).marks == ("<h1>",)
