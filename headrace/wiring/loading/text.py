"""What a model says besides its weights: its tokenizer, chat templates and sampling defaults.

A folder says it in files, and a GGUF file in its metadata. Nothing behind this depends on which of them it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.compute.model.gguf.config import generation_of
from headrace.compute.model.gguf.file import GgufFile, is_gguf
from headrace.compute.model.hub import resolve_model
from headrace.config import ModelOptions
from headrace.service.sampling_defaults import SamplingDefaults, read_defaults
from headrace.text import gguf
from headrace.text.content import AddedTokens
from headrace.text.named_tokens import shown_ends
from headrace.text.template import ChatTemplate, given_template, load_templates, with_tools
from headrace.text.tokenizer import Tokenizer, TokenizerError

WEIGHT_FILES = "*.safetensors"


def weight_files(path: Path, file: GgufFile | None = None) -> Sequence[Path]:
    """The files that define the weights of a model: a GGUF file with its parts, or those of a folder.

    ``file`` is the GGUF file if it is open already.
    """
    if is_gguf(path):
        return (file or GgufFile.open(path)).paths
    return sorted([*path.glob(WEIGHT_FILES), *path.glob("config.json")])


class ModelText(NamedTuple):
    """A model's place (a folder or a GGUF file), its tokenizer, chat template, and the defaults of its requests.

    ``files`` define its weights.
    """

    path: Path
    files: Sequence[Path]
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults


def load_text(model: ModelOptions, tool_parser: str) -> ModelText:
    """Read it from the model, or tokenizer and templates from ``--tokenizer``.

    A template that shows no tools gets a standard way to show them, in the format of ``tool_parser``. Known ends of
    turns that it writes end answers, also where no other file names them.

    Raises:
        ModelError, TokenizerError, TemplateError, DefaultsError: a file is missing or malformed.
    """
    path = resolve_model(model.model, model.revision, with_weights=model.load_format != "dummy")
    source = resolve_model(model.tokenizer, with_weights=False) if model.tokenizer else path
    file = GgufFile.open(path) if is_gguf(path) else None
    tokenizer, templates = _read_text(source, file if source == path else None)
    if model.chat_template:
        templates = {"default": given_template(model.chat_template)}
    control = {str(tokenizer.token(id)): id for id in tokenizer.special_token_ids}
    tokenizer = tokenizer.ended_by(shown_ends(control, templates.values()))
    added = AddedTokens() if model.allow_special_tokens_in_content else tokenizer.added
    template = with_tools(ChatTemplate(templates, tokenizer.special_tokens, added), tool_parser)
    overrides = json.loads(model.override_generation_config or "{}")
    own = None if file is None else generation_of(file)
    defaults = read_defaults(path, model.generation_config, overrides, own)
    return ModelText(path, weight_files(path, file), tokenizer, template, defaults)


def _read_text(path: Path, file: GgufFile | None) -> tuple[Tokenizer, Mapping[str, str]]:
    """The tokenizer and the chat templates of a folder or GGUF file; ``file`` is that if it is open already.

    Raises:
        ModelError, TokenizerError, TemplateError: a file is missing or malformed.
    """
    if not is_gguf(path):
        return Tokenizer.from_folder(path), load_templates(path)
    metadata: Mapping[str, Any] = (file or GgufFile.open(path)).metadata
    try:
        return gguf.read_tokenizer(metadata), gguf.read_templates(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
