from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.text.template import ChatTemplate, TemplateError, given_template, load_templates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "marked turns": """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "instructions in brackets": """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = false -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- if loop.first and system -%}
        {%- set text = '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' ~ message['content'] -%}
    {%- else -%}
        {%- set text = message['content'] -%}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + text.strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}""",
    "tools, macros and namespaces": """\
{%- macro describe(tool, depth=0) -%}
{{ '  ' * depth ~ tool.function.name }}: {{ tool.function | tojson }}
{% endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(seen=0, last=none) -%}
{%- for message in messages | selectattr('role', 'ne', 'system') -%}
    {%- if message.role == 'tool' -%}{%- continue -%}{%- endif -%}
    {%- set ns.seen = ns.seen + 1 -%}
    {%- set ns.last = message -%}
<{{ message.role | upper }} n="{{ ns.seen }}">{% generation %}{{ message.content | trim }}{% endgeneration %}</>
{% endfor -%}
{%- if tools is not none -%}
    {%- for tool in tools -%}{{ describe(tool, loop.index) }}{%- endfor -%}
{%- endif -%}
{{- messages | length }} {{ ns.last['content'] | default('none') | length }}
{{- messages | map(attribute='role') | join(', ') }}
{%- if enable_thinking is defined and enable_thinking %}<think>{% endif -%}
{%- if add_generation_prompt %}<ASSISTANT>{% endif -%}""",
    "json of everything": """\
{{ {'a': 'é <b> & "q"', 'n': [1, 2.5, none, true]} | tojson }}{{ messages | tojson(indent=2) }}
{{- 'a b'.split(' ') | join('-') }} {{ '%s is %d' % ('x', 3) }} {{ '{}!'.format('hey') }} {{ 7 // 2 * 3 ** 2 }}
{{- messages[-1].missing }} {{ 'content' in messages[0] }} {{ [1, 2] + [3] }} {{ 'x' * 3 }}""",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hello, ünï 😀 <b> "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": " Two.\n"},
        {"role": "user", "content": "Three?"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "big": 2**60}}}]


def rendered_by_transformers(source: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    texts, _ = utils.render_jinja_template(
        conversations=[messages], chat_template=source, **TOKENS, **arguments
    )
    return str(texts[0])


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("messages", CHATS, ids=["one turn", "four turns"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS},
        {"add_generation_prompt": True, "enable_thinking": True},
    ],
    ids=["plain", "tools", "thinking"],
)
def test_renders_as_transformers_does(
    source: str, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    ours = ChatTemplate({"default": source}, TOKENS).render(messages, **arguments).text
    assert ours == rendered_by_transformers(source, messages, **arguments)


@pytest.mark.parametrize("name", ["marked turns", "tools, macros and namespaces"])
@pytest.mark.parametrize("ending", ["Once upon", "Once upon "])
def test_continues_the_final_message_as_transformers_does(name: str, ending: str) -> None:
    messages = [CHATS[0][0], {"role": "assistant", "content": ending}]
    arguments: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    ours = ChatTemplate({"default": TEMPLATES[name]}, TOKENS).render(messages, **arguments).text
    assert ours == rendered_by_transformers(TEMPLATES[name], messages, **arguments)
    assert ours.rstrip().endswith("Once upon")


def render(source: str, messages: list[Mapping[str, Any]] | None = None, **arguments: Any) -> str:
    return ChatTemplate({}, TOKENS).render(messages or CHATS[0], template=source, **arguments).text


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(TemplateError, match=r"messages\[0\].content: only parts of type text"):
        render("{{ messages[0].content }}", [{"role": "user", "content": [{"type": "image_url"}]}])


def test_messages_are_left_as_they_were() -> None:
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "a"}]
    render("{{ messages[0].content }}", messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "a"}]


def test_tools_choose_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert template.render(CHATS[0]).text == "plain"
    assert template.render(CHATS[0], tools=TOOLS).text == "with tools"


def test_a_model_without_template_says_what_to_pass() -> None:
    template = ChatTemplate({}, TOKENS)
    with pytest.raises(TemplateError, match="--chat-template"):
        template.render(CHATS[0])


def test_a_broken_model_template_is_found_when_loaded() -> None:
    with pytest.raises(TemplateError, match="syntax error in line 2"):
        ChatTemplate({"default": "ok\n{% if %}"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "syntax error in line 1"),
        ("{{ raise_exception('no system role') }}", "^no system role$"),
        ("{{ nothing.at_all }}", "undefined: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "Recursion"),
        ("{% include 'file' %}", "failed|no loader"),
    ],
)
def test_a_failing_template_says_why(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_json_cannot_be_indented_without_end() -> None:
    with pytest.raises(TemplateError, match="indent must be at most"):
        render("{{ messages | tojson(indent=1000000000) }}")


def test_templates_are_found_in_every_place(tmp_path: Path) -> None:
    assert load_templates(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "oldest"}')
    assert load_templates(tmp_path) == {"default": "oldest"}
    named = '{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}'
    (tmp_path / "tokenizer_config.json").write_text(named)
    assert load_templates(tmp_path) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("newest")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_templates(tmp_path) == {"default": "newest", "tool_use": "tools"}


def test_the_command_line_may_give_a_file_or_a_source(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("from the file {{ bos_token }}")
    given = str(tmp_path / "mine.jinja")
    assert given_template(given) == "from the file {{ bos_token }}"
    assert given_template("{{ eos_token }}!") == "{{ eos_token }}!"
    with pytest.raises(TemplateError, match="cannot be read"):
        given_template(str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("value", ["5", '["a"]', '[{"name": "default"}]', '[{"name": "a", "template": 5}]'])
def test_a_malformed_field_of_a_config_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {value}}}')
    with pytest.raises(
        TemplateError, match=r"tokenizer_config\.json: chat_template must be a source, or a list"
    ):
        load_templates(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TemplateError, match=r"chat_template\.jinja cannot be read"):
        load_templates(tmp_path)


def test_a_source_beyond_the_compilers_limits_is_an_error_of_the_template():
    with pytest.raises(TemplateError, match="cannot be compiled"):
        ChatTemplate({"default": "{{ " + "9" * 5000 + " }}"})
