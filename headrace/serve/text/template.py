"""The model's chat template: renders messages to the text of the prompt.

Templates come with models and, if the server allows it, with requests. So they run in jinja2's sandbox and under
`Budget`: a template with an endless loop or endless output fails instead of stalling the server. It does not produce
tokens: encode its output with ``add_special_tokens=False``, because templates write special tokens themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.serve.text.budget import Budget, BudgetExceeded, Metered
from headrace.serve.text.tokenizer import read_json

MAX_INDENT = 32
# Marks the end of the last message while rendering, to find it in the prompt. A space follows: where the
# template trims that space, it would have trimmed the end of the message too.
_END = "\u2063END-OF-CONTINUED-MESSAGE\u2063"


class TemplateError(ValueError):
    """A chat template that cannot be compiled, or that failed on these messages."""


class ChatTemplate:
    """Renders messages with a model's templates.

    Args:
        templates: jinja2 sources by name; ``default`` is used unless the call has tools and there is one named
            ``tool_use``. It may be empty: then `render` needs a template of its own.
        special_tokens: ``bos_token`` and others, which templates write themselves.

    Raises:
        TemplateError: one of the templates has a syntax error.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        for source in self._templates.values():
            _compile(source)

    @property
    def digest(self) -> str:
        """A digest of these templates and their special tokens."""
        described = json.dumps([self._templates, self._special_tokens], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    @property
    def sources(self) -> tuple[str, ...]:
        """The templates' texts."""
        return tuple(self._templates.values())

    def variables(self, template: str | None = None) -> frozenset[str]:
        """The names that a template (the model's, or a source) reads and does not define itself."""
        names: set[str] = set()
        for source in self.sources if template is None else (template,):
            _compile(source)  # bounds the time, and names what is wrong
            names |= jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
        return frozenset(names)

    @classmethod
    def from_folder(
        cls, folder: str | Path, special_tokens: Mapping[str, str], chat_template: str | None = None
    ) -> ChatTemplate:
        """The templates of a model folder, or ``chat_template`` (a file's path, or a source) instead of them.

        Raises:
            TemplateError: a template has a syntax error or cannot be read, or ``chat_template`` is neither a source
                nor a file.
        """
        templates = {"default": _given(chat_template)} if chat_template else load_templates(folder)
        return cls(templates, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``.

        Args:
            messages: as in the OpenAI API; content that is a list of text parts is joined by line breaks.
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end inside the last message, so that the answer continues it.
            template: a jinja2 source to use instead of the model's. **variables: ``tools``, ``documents`` and other
                variables of the template.

        Raises:
            TemplateError: there is no template; or it has a syntax error, rejects these messages, fails on them, or
                exceeds its `Budget`.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt cannot both be set")
        compiled = _compile(template if template is not None else self._choose(variables))
        plain = [_with_plain_content(message, number) for number, message in enumerate(messages)]
        if continue_final_message:
            plain[-1:] = [_marked(plain[-1] if plain else {})]
        variables.setdefault("tools", None)
        variables.setdefault("documents", None)
        text = _run(
            compiled,
            self._special_tokens
            | variables
            | {"messages": plain, "add_generation_prompt": add_generation_prompt},
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, variables: Mapping[str, Any]) -> str:
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError("the model has no chat template; pass one with --chat-template FILE")
        return self._templates[name]


def load_templates(folder: str | Path) -> dict[str, str]:
    """The chat templates of a model folder by name.

    They are read from ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``. Otherwise they are read
    from the field ``chat_template`` of ``tokenizer_config.json`` (a source, or a list of named ones), or of
    ``chat_template.json``.

    Raises:
        TemplateError: one cannot be read, or is not a source.
    """
    folder = Path(folder)
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    found = {name: _read(path) for name, path in files.items() if path.is_file()}
    if "default" in found:
        return found
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / name).get("chat_template")
        if isinstance(value, str):
            return {"default": value} | found
        if value is not None:
            return _named(value, folder / name) | found
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from error


def _named(value: Any, path: Path) -> dict[str, str]:
    """The templates that a config lists, by name."""
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {"default": None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TemplateError(
            f"{path}: chat_template must be a source, or a list of objects with name and template"
        )
    return named


def _given(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"--chat-template {chat_template} cannot be read: {error}") from error


def _with_plain_content(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise TemplateError(f"messages[{number}].content: only parts of type text are supported")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise TemplateError("continue_final_message needs a last message with text content")
    return {**message, "content": content + _END + " "}


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END)
    if end < 0:
        raise TemplateError("continue_final_message: the chat template leaves out the last message")
    return text[:end] if text.startswith(" ", end + len(_END)) else text[:end].rstrip()


def _run(compiled: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render within a budget; every failure becomes a `TemplateError`."""
    budget = Budget()
    try:
        with budget:
            parts = []
            for part in compiled.generate(variables):
                budget.write(len(part))
                parts.append(part)
        text = "".join(parts)
        text.encode()  # an expression can contain a lone surrogate
        return text
    except BudgetExceeded as error:
        raise TemplateError(f"the chat template was stopped: {error}") from error
    except jinja2.UndefinedError as error:
        raise TemplateError(f"the chat template uses something undefined: {error.message}") from error
    except jinja2.TemplateError as error:
        raise TemplateError(error.message or "the chat template rejected these messages") from error
    except Exception as error:  # a template can raise anything its expressions can
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    try:
        with Budget():  # jinja2 computes constant expressions while it compiles
            return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"in line {error.lineno}"
        raise TemplateError(f"the chat template has a syntax error {where}: {error.message}") from error
    except Exception as error:  # jinja2 and Python's parser raise many types
        raise TemplateError(f"the chat template cannot be compiled: {error}") from error


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks an assistant's text for training and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(Metered, ImmutableSandboxedEnvironment):
    """The sandbox for model templates, with metering."""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; jinja2's own filter escapes for HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise jinja2.TemplateError(f"tojson: indent must be at most {MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # can write for minutes in one call
    environment.finalize = environment.check_text
    environment.meter_filters()
    return environment


_ENVIRONMENT = _make_environment()
