"""The sampling parameters of requests that give none of their own, from the model's ``generation_config.json``.

The rules are vLLM's: ``do_sample`` and fields that are not listed in `GENERATION_FIELDS` are ignored, and null removes
a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.objects import GENERATION_FIELDS
from headrace.core.request import InvalidParameter, SamplingParams
from headrace.text.tokenizer import TokenizerError, read_json

FILE = "generation_config.json"
OPTION, OVERRIDE = "--generation-config", "--override-generation-config"
AUTO, NEUTRAL = "auto", "vllm"


class DefaultsError(ValueError):
    """Defaults that cannot be used; the message names the file or the option, the field and the limit."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """``params`` apply where a request gives no value. ``most_tokens`` bounds the output of every request.

    ``source`` names the file or option that they come from; empty: they are neutral.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    most_tokens: int | None = None
    source: str = ""

    def describe(self) -> str:
        """The values that are not neutral, and where they come from; empty if there are none."""
        neutral = SamplingParams()
        values = {name: getattr(self.params, _own(name)) for name in GENERATION_FIELDS}
        shown = [
            f"{name} {value:g}" for name, value in values.items() if value != getattr(neutral, _own(name))
        ]
        return f"{', '.join(shown)} ({self.source})" if shown else ""


NO_DEFAULTS = SamplingDefaults()
"""Neutral values."""


def read_defaults(
    folder: Path, source: str, overrides: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """The defaults of the model in ``folder``.

    Args:
        source: auto takes the model's file, vllm none; or another folder, or a file.
        overrides: values that count more than those of the file.
        own: the values of a model that has no such file, and says them in another way.

    Raises:
        DefaultsError: the file that ``source`` names is missing or malformed, or a value is out of range.
    """
    path = folder / FILE if own is None else folder
    if source not in (AUTO, NEUTRAL):
        path = Path(source).expanduser()
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise DefaultsError(f"{OPTION} {source}: there is no file {path}")
    try:
        found = {} if source == NEUTRAL else own if own is not None and source == AUTO else read_json(path)
    except TokenizerError as error:
        raise DefaultsError(str(error)) from error
    stored = {
        name: found[name]
        for name in GENERATION_FIELDS
        if found.get(name) is not None and name not in overrides
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    _check(stored, str(path), f"; {OVERRIDE} replaces it, and {OPTION} {NEUTRAL} ignores the file")
    _check(given, OVERRIDE, "")
    where = " and ".join([*([str(path)] if stored else []), *([OVERRIDE] if given else [])])
    params = SamplingParams(**{_own(name): value for name, value in (stored | given).items()})
    fixed = given if source in (AUTO, NEUTRAL) else stored | given
    return SamplingDefaults(params, fixed.get("max_new_tokens"), where)


def _own(name: str) -> str:
    """The name of a field of the file in `SamplingParams`."""
    return "max_tokens" if name == "max_new_tokens" else name


def _check(values: Mapping[str, Any], where: str, remedy: str) -> None:
    for name, value in values.items():
        try:
            SamplingParams(**{_own(name): value})
        except InvalidParameter as error:
            message = str(error).replace(_own(name), name, 1)
            raise DefaultsError(f"{where}: {message}{remedy}") from None
