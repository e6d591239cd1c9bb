"""The formats of known model families. A new family is a new entry here, and a file in the tests' corpus."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from headrace.text.parsing.formats import Arguments, Elements, Opening, ReasoningFormat, ToolFormat, Written

# ruff: noqa: RUF001 (markers are spelled as in the models)


_NAME = r"(?P<name>[\w-][\w.-]*)"
_SEP = re.escape("<｜tool▁sep｜>")
_XML_NAME = r"(?P<name>[^<>\s]+)"
_HARMONY_HEADER = (
    r"(?:functions\.)?"
    + _NAME
    + r"(?:<\|channel\|>commentary)?(?:\s*(?:<\|constrain\|>)?\s*\w+)?\s*<\|message\|>\s*(?=\{)"
)
_HARMONY_INNER = ("<|channel|>", "<|constrain|>", "<|message|>")
_HARMONY_SILENT = (
    "<|start|>assistant",
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>commentary<|message|>",
    "<|end|>",
    "<|return|>",
)

_HERMES_CALL = Written(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"
)
_MISTRAL_CALL = Written('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]", trigger="[TOOL_CALLS]")
_PHI_CALL = Written(
    '<|tool_call|>[{"name": "', '", "arguments": ', "}]<|/tool_call|>", trigger="<|tool_call|>"
)
_PLAIN_CALL = Written('{"name": "', '", "parameters": ', "}")
_DEEPSEEK_CALL = Written(
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
)
_MINIMAX_CALL = Written(
    '<minimax:tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</minimax:tool_call>",
    trigger="<minimax:tool_call>",
)
_SEED_CALL = Written(
    '<seed:tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</seed:tool_call>",
    trigger="<seed:tool_call>",
)
_KIMI_CALL = Written(
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|><|tool_calls_section_end|>",
    trigger="<|tool_calls_section_begin|>",
)
_COHERE_CALL = Written(
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "',
    '", "parameters": ',
    "}\n]<|END_ACTION|>",
    trigger="<|START_ACTION|>",
)
_COHERE_SILENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_HARMONY_CALL = Written(
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    trigger="<|channel|>commentary to=",
    single=True,
)

_PYTHONIC_CALL = Written("[", "(", ")]", single=True, python=True)
_LLAMA4_CALL = Written(
    "<|python_start|>[", "(", ")]<|python_end|>", trigger="<|python_start|>", single=True, python=True
)
_OLMO3_CALL = Written(
    "<function_calls>\n", "(", ")\n</function_calls>", trigger="<function_calls>", single=True, python=True
)
_GEMMA4_CALL = Written("<|tool_call>call:", "{", "}<tool_call|>", trigger="<|tool_call>", quote='<|"|>')
_LFM2_CALL = Written(
    "<|tool_call_start|>[",
    "(",
    ")]<|tool_call_end|>",
    trigger="<|tool_call_start|>",
    single=True,
    python=True,
)
_FUNCTIONGEMMA_CALL = Written(
    "<start_function_call>call:",
    "{",
    "}<end_function_call>",
    trigger="<start_function_call>",
    quote="<escape>",
)

_PARAMETERS = Elements(
    re.compile(r"<parameter=([^>\n]+)>\n?"), "<parameter=", ">", "</parameter>", "</function>", lines=True
)
_INVOKED = Elements(
    re.compile(r'<parameter name="([^"\n]+)">'), '<parameter name="', '">', "</parameter>", "</invoke>"
)
_ARGUMENTS = Elements(
    re.compile(r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>"),
    "<arg_key>",
    "</arg_key>",
    "</arg_value>",
    "</tool_call>",
)


def _functions(begin: str, end: str) -> tuple[Opening, ...]:
    """Calls as ``<function=NAME>`` with elements of parameters, between two marks; the first mark may be missing."""
    return (
        Opening(
            begin,
            (end,),
            Arguments.XML,
            header=re.compile(rf"\s*<function={_XML_NAME}\s*>"),
            objects=True,
            elements=_PARAMETERS,
        ),
        Opening(
            "<function=",
            (end,),
            Arguments.XML,
            header=re.compile(rf"{_XML_NAME}\s*>"),
            elements=_PARAMETERS,
        ),
    )


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "harmony",
        (
            Opening(
                "<|channel|>commentary to=",
                ("<|call|>", "<|end|>"),
                header=re.compile(_HARMONY_HEADER),
                inner=_HARMONY_INNER,
            ),
            Opening(
                "<|channel|>analysis to=",
                ("<|call|>", "<|end|>"),
                header=re.compile(_HARMONY_HEADER),
                inner=_HARMONY_INNER,
            ),
            Opening(
                "<|start|>assistant to=",
                ("<|call|>", "<|end|>"),
                header=re.compile(_HARMONY_HEADER),
                inner=_HARMONY_INNER,
            ),
        ),
        written=_HARMONY_CALL,
        signs=(("<|channel|>", "<|message|>", "<|start|>"),),
        silent=(
            *_HARMONY_SILENT,
            "<|call|>",
        ),
        aliases=("openai",),
    ),
    ToolFormat(
        "deepseek",
        (
            Opening(
                "<｜tool▁call▁begin｜>",
                ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
                header=re.compile(rf"\s*(?:function{_SEP})?{_NAME}(?:{_SEP}|\s*\n```(?:json)?)\s*(?=\{{)"),
                inner=("<｜tool▁sep｜>",),
            ),
        ),
        written=_DEEPSEEK_CALL,
        signs=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",)),
        silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        aliases=("deepseek_v3", "deepseek_v31"),
    ),
    ToolFormat(
        "kimi_k2",
        (
            Opening(
                "<|tool_call_begin|>",
                ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
                header=re.compile(
                    rf"\s*(?:functions\.)?{_NAME}(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"
                ),
                inner=("<|tool_call_argument_begin|>",),
            ),
        ),
        written=_KIMI_CALL,
        signs=(("<|tool_calls_section_begin|>",), ("tool_declare<|im_middle|>",)),
        silent=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ToolFormat(
        "cohere",
        (Opening("<|START_ACTION|>", ("<|END_ACTION|>",), key="tool_name"),),
        written=_COHERE_CALL,
        signs=(("<|START_ACTION|>",),),
        silent=_COHERE_SILENT,
        aliases=("cohere_command3", "cohere_command4"),
    ),
    ToolFormat(
        "gemma4",
        (
            Opening(
                "<|tool_call>",
                ("<tool_call|>",),
                Arguments.LITERAL,
                header=re.compile(rf"\s*call:{_NAME}(?=\{{)"),
                quotes=('<|"|>',),
            ),
        ),
        written=_GEMMA4_CALL,
        signs=(("<|tool_call>", "call:"),),
    ),
    ToolFormat(
        "functiongemma",
        (
            Opening(
                "<start_function_call>",
                ("<end_function_call>",),
                Arguments.LITERAL,
                header=re.compile(rf"\s*call:{_NAME}(?=\{{)"),
                quotes=("<escape>",),
            ),
        ),
        written=_FUNCTIONGEMMA_CALL,
        signs=(("<start_function_call>",),),
    ),
    ToolFormat(
        "minimax_m2",
        (
            Opening(
                "<minimax:tool_call>",
                ("</minimax:tool_call>",),
                Arguments.XML,
                header=re.compile(r'\s*<invoke name="(?P<name>[^"\n]+)">'),
                objects=True,
                elements=_INVOKED,
            ),
            Opening(
                '<invoke name="',
                ("</minimax:tool_call>",),
                Arguments.XML,
                header=re.compile(r'(?P<name>[^"\n]+)">'),
                elements=_INVOKED,
            ),
        ),
        written=_MINIMAX_CALL,
        signs=(("<minimax:tool_call>",),),
    ),
    ToolFormat(
        "seed_oss",
        _functions("<seed:tool_call>", "</seed:tool_call>"),
        written=_SEED_CALL,
        signs=(("<seed:tool_call>",),),
    ),
    ToolFormat(
        "qwen3_coder",
        _functions("<tool_call>", "</tool_call>"),
        written=_HERMES_CALL,
        signs=(("<function=", "<parameter="),),
        aliases=("qwen3_xml", "mimo"),
    ),
    ToolFormat(
        "glm45",
        (
            Opening(
                "<tool_call>",
                ("</tool_call>",),
                Arguments.XML,
                header=re.compile(rf"\s*{_XML_NAME}\s*(?=<)"),
                objects=True,
                inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
                elements=_ARGUMENTS,
            ),
        ),
        written=_HERMES_CALL,
        signs=(("<arg_key>", "<arg_value>"),),
        aliases=("glm47",),
    ),
    ToolFormat(
        "hermes",
        (Opening("<tool_call>", ("</tool_call>",)),),
        written=_HERMES_CALL,
        signs=(("<tool_call>",),),
        aliases=("granite4",),
    ),
    ToolFormat(
        "mistral",
        (
            Opening(
                "[TOOL_CALLS]",
                header=re.compile(rf"\s*{_NAME}(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)"),
                objects=True,
                inner=("[CALL_ID]", "[ARGS]"),
            ),
        ),
        written=_MISTRAL_CALL,
        signs=(("[TOOL_CALLS]",),),
        short_ids=True,
    ),
    ToolFormat(
        "phi4_mini",
        (Opening("<|tool_call|>", ("<|/tool_call|>",)), Opening("functools", ("<|/tool_call|>",))),
        written=_PHI_CALL,
        signs=(("<|tool_call|>",), ("functools",)),
        aliases=("phi4_mini_json",),
    ),
    ToolFormat(
        "llama4_pythonic",
        (
            Opening("<|python_start|>", ("<|python_end|>",), Arguments.PYTHON),
            Opening("", ("<|python_end|>",), Arguments.PYTHON, first="[", known=True),
        ),
        written=_LLAMA4_CALL,
        signs=(("<|python_start|>",),),
    ),
    ToolFormat(
        "lfm2",
        (Opening("<|tool_call_start|>", ("<|tool_call_end|>",), Arguments.PYTHON),),
        written=_LFM2_CALL,
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ToolFormat(
        "olmo3",
        (Opening("<function_calls>", ("</function_calls>",), Arguments.PYTHON),),
        written=_OLMO3_CALL,
        signs=(("<function_calls>",),),
    ),
    ToolFormat(
        "llama3_json",
        (Opening("<|python_tag|>"), Opening("", first="{", known=True)),
        written=_PLAIN_CALL,
        signs=(("<|python_tag|>",), ('{"name": function name',), ("<|start_header_id|>", '"parameters": ')),
        aliases=("llama4_json",),
    ),
    ToolFormat(
        "gemma",
        (
            Opening("```tool_code", ("```",), Arguments.PYTHON),
            Opening("```tool_call", ("```",)),
            Opening("```json", ("```",), known=True),
            Opening("", first="{", known=True),
            Opening("", arguments=Arguments.PYTHON, first="[", known=True),
        ),
        written=_PLAIN_CALL,
        signs=(("<start_of_turn>",),),
    ),
    ToolFormat(
        "pythonic",
        (Opening("", arguments=Arguments.PYTHON, first="[", known=True),),
        written=_PYTHONIC_CALL,
        signs=(("func_name1(",), ("[func(",)),
    ),
)
"""In the order in which they are tried: a format whose signs also occur in other templates comes later."""

PLAIN_JSON = ToolFormat("json", (Opening("", first="{", known=True),), signs=(), written=_PLAIN_CALL)
"""The format of calls that a grammar forces a model to write which has no format of its own."""

_THINK = (("<think>",), ("</think>",))

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "harmony",
        ("<|channel|>analysis<|message|>",),
        ("<|end|>", "<|return|>"),
        signs=(("<|channel|>", "<|message|>", "<|start|>"),),
        first=False,
        silent=_HARMONY_SILENT,
        aliases=("openai_gptoss",),
    ),
    ReasoningFormat(
        "gemma4", ("<|channel>thought\n",), ("<channel|>",), signs=(("<|channel>",),), first=False
    ),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), signs=(("<seed:think>",),)),
    ReasoningFormat(
        "cohere",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        signs=(("<|START_THINKING|>",),),
        silent=_COHERE_SILENT,
        aliases=("cohere_command3", "cohere_command4"),
    ),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), signs=(("[THINK]",),)),
    ReasoningFormat(
        "think",
        *_THINK,
        signs=(("<think>",), ("</think>",)),
        aliases=(
            *("deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2"),
            *("mimo", "nemotron_v3", "olmo3", "qwen3", "step3p5"),
        ),
    ),
    ReasoningFormat("deepseek_r1", *_THINK, signs=(), assumed=True, aliases=("minimax_m2", "step3")),
)


# Detects the format that a model writes from the text of its chat template, which shows the model how to call tools.
#
# A template that contains a family's markers was written for it, so the parser of a known family needs no option.

AUTO = "auto"

FormatT = TypeVar("FormatT", bound=ToolFormat | ReasoningFormat)


class UnknownParser(ValueError):
    """A name that is not in the catalogue; the message lists the names."""


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The tool format with the name or alias ``name``. For ``auto`` the one that ``template`` shows, if it shows any.

    Raises:
        UnknownParser: there is no such format.
    """
    return _find(TOOL_FORMATS, name, template, "--tool-call-parser")


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The reasoning format with the name or alias ``name``. For ``auto`` the one that ``template`` shows, if any.

    Raises:
        UnknownParser: there is no such format.
    """
    return _find(REASONING_FORMATS, name, template, "--reasoning-parser")


def _find(formats: Iterable[FormatT], name: str, template: str, flag: str) -> FormatT | None:
    if name == AUTO:
        return next((each for each in formats if _shows(each, template)), None)
    found = next((each for each in formats if name in _names(each)), None)
    if found is None:
        names = ", ".join([AUTO, *sorted(chain.from_iterable(map(_names, formats)))])
        raise UnknownParser(f"{flag} {name}: there is no such parser; there are {names}")
    return found


def _names(each: ToolFormat | ReasoningFormat) -> tuple[str, ...]:
    return each.name, *each.aliases


def _shows(each: ToolFormat | ReasoningFormat, template: str) -> bool:
    return any(all(sign in template for sign in group) for group in each.signs)
