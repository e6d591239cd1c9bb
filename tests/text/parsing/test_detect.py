import pytest

from headrace.text.parsing.catalogue import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    UnknownParser,
    reasoning_format,
    tool_format,
)

TEMPLATES = {
    "hermes": 'return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>}',
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n</tool_call>",
    "minimax_m2": "{%- set begin = '<minimax:tool_call>' -%}<invoke name='f'>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
    "lfm2": "{{- 'List of tools: <|tool_list_start|>[' -}}",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.',
    "llama4_pythonic": "{{- '<|python_start|>' }}",
    "olmo3": "<function_calls>{{ call }}</function_calls>",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "phi4_mini": "{{ '<|tool_call|>' + calls + '<|/tool_call|>' }}",
    "gemma4": "{{- '<|tool_call>call:' + function.name + '{' }}",
    "functiongemma": "{{ '<start_function_call>call:' }}",
    "gemma": "{{ '<start_of_turn>' + role + '\n' }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}",  # noqa: RUF001
    "kimi_k2": "<|tool_calls_section_begin|>",
    "cohere": "{{ '<|START_ACTION|>[' }}{% for tool_call in message.tool_calls %}",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "pythonic": "[func_name1(params_name1=params_value1), func_name2(params)]",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_picks_by_the_template(name):
    found = tool_format("auto", TEMPLATES[name])
    assert found is not None
    assert found.name == name


def test_a_template_that_shows_no_calls_has_no_format():
    assert tool_format("auto", "{{ messages[0].content }}") is None
    assert reasoning_format("auto", "{{ messages[0].content }}") is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\n\n</think>\n\n' }}", "think"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|channel>thought\n", "gemma4"),
        ("<seed:think>{{ x }}</seed:think>", "seed_oss"),
        ("{{ '<|START_THINKING|>' + message.tool_plan + '<|END_THINKING|>' }}", "cohere"),
    ],
)
def test_reasoning_is_picked_by_the_template(template, name):
    found = reasoning_format("auto", template)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("find", "formats"), [(tool_format, TOOL_FORMATS), (reasoning_format, REASONING_FORMATS)]
)
def test_each_name_belongs_to_one_format(find, formats):
    names = [name for each in formats for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))
    for each in formats:
        assert all(find(name, "") is each for name in (each.name, *each.aliases))


@pytest.mark.parametrize(
    ("find", "name", "ours"),
    [
        (tool_format, "openai", "harmony"),
        (tool_format, "deepseek_v3", "deepseek"),
        (tool_format, "deepseek_v31", "deepseek"),
        (tool_format, "qwen3_xml", "qwen3_coder"),
        (tool_format, "glm47", "glm45"),
        (tool_format, "granite4", "hermes"),
        (tool_format, "phi4_mini_json", "phi4_mini"),
        (tool_format, "llama4_json", "llama3_json"),
        *((find, f"cohere_command{n}", "cohere") for find in (tool_format, reasoning_format) for n in (3, 4)),
        *((tool_format, name, name) for name in ("hermes", "llama3_json", "llama4_pythonic", "mistral")),
        *((tool_format, name, name) for name in ("kimi_k2", "olmo3", "pythonic", "gemma4", "functiongemma")),
        (reasoning_format, "openai_gptoss", "harmony"),
        *(
            (reasoning_format, name, "think")
            for name in ("qwen3", "deepseek_v3", "glm45", "olmo3", "kimi_k2")
        ),
        *((reasoning_format, name, "deepseek_r1") for name in ("deepseek_r1", "step3", "minimax_m2")),
        *((reasoning_format, name, name) for name in ("mistral", "gemma4")),
    ],
)
def test_a_name_of_vllm_is_an_alias(find, name, ours):
    assert find(name, "").name == ours


@pytest.mark.parametrize("name", ["jamba", "internlm", "xlam", "step3", "granite"])
def test_a_name_of_vllm_whose_format_is_not_known_is_refused_with_the_names(name):
    with pytest.raises(
        UnknownParser, match=rf"--tool-call-parser {name}: .* auto, cohere, .*deepseek, .*openai"
    ):
        tool_format(name, "")


def test_a_name_wins_over_the_template_and_a_wrong_one_is_refused():
    found = tool_format("mistral", TEMPLATES["hermes"])
    assert found is not None
    assert found.name == "mistral"
    with pytest.raises(
        UnknownParser, match=r"--tool-call-parser herms: there is no such parser; there are auto, .*hermes"
    ):
        tool_format("herms", "")
    with pytest.raises(UnknownParser, match="--reasoning-parser"):
        reasoning_format("x", "")


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("think", "What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|></think>", False),
    ],
)
def test_the_prompt_may_have_opened_the_reasoning(name, prompt, is_open):
    found = reasoning_format(name, "")
    assert found is not None
    assert found.is_open(prompt) is is_open
