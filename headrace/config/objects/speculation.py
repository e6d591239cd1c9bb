"""The value of ``--speculative-config``: a JSON object, with vLLM's keys where they exist, checked key by key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.errors import ConfigError, suggestion
from headrace.config.objects.readers import Reader, json_object, read_keys, switch, text, whole_number
from headrace.config.values import parse_size

METHODS = ("ngram", "suffix", "prediction", "cached", "draft_model", "eagle3")

HEADS = ("eagle3",)
"""Methods that use a draft head, which reads hidden states of the served model."""

LOADED = ("draft_model", *HEADS)
"""Methods that load the weights of ``model``."""

HEADS_ONLY = "EAGLE-3 heads are the only supported ones (method eagle3)"
NO_MTP = "MTP layers are not supported, and no supported architecture has them; use draft_model or eagle3"
REFUSED = dict.fromkeys(("eagle", "medusa", "mlp_speculator"), HEADS_ONLY)
"""vLLM's methods that are refused, with the reason; so are names that end with ``mtp``."""

QUANTIZATIONS = ("int8", "int4", "w4a8")

EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 8}'

MOST_TOKENS = 64
"""Maximum ``num_speculative_tokens``: longer drafts are rarely worth their cost."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made, and how many draft tokens are verified.

    All ``methods`` propose drafts; for each request the most promising one is used. ``num_speculative_tokens`` is the
    maximum number of draft tokens of a request in a step. If ``adaptive``, only as many are verified as are worth their
    cost. ``prompt_lookup_min`` and ``prompt_lookup_max`` bound the number of tokens that ``ngram`` looks up.
    ``suffix_max_bytes`` is the memory of the past outputs that ``suffix`` searches. ``model`` is the draft model of
    ``draft_model`` (a folder, a Hugging Face name or builtin-draft) or the head of ``eagle3``, ``revision`` its branch,
    tag or commit, and ``quantization`` quantizes the weights of a draft model while loading.
    """

    methods: tuple[str, ...]
    num_speculative_tokens: int = 16
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16
    suffix_max_bytes: int = 64 << 20
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None

    @property
    def has_head(self) -> bool:
        """Whether a head drafts."""
        return not set(HEADS).isdisjoint(self.methods)


def read_speculation(label: str, value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """The configuration from JSON text or an object; an error names it ``label``.

    Raises:
        ConfigError: it is no JSON object, or a key or a value is unknown.
    """
    given = json_object(label, value, EXAMPLE)
    read = read_keys(label, given, _READERS)
    if "method" not in given:
        raise ConfigError(
            f"{label}: the key 'method' is missing: one of {', '.join(METHODS)}, or a list of them"
        )
    config = SpeculativeConfig(methods=read.pop("method"), **read)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"{label}: prompt_lookup_min {config.prompt_lookup_min} is above prompt_lookup_max"
            f" {config.prompt_lookup_max}"
        )
    _check_model(label, config)
    return config


def _check_model(label: str, config: SpeculativeConfig) -> None:
    loaded = [method for method in config.methods if method in LOADED]
    if len(loaded) > 1:
        raise ConfigError(f"{label}: methods {' and '.join(loaded)} exclude each other: use one of them")
    if loaded and config.model is None:
        raise ConfigError(
            f"{label}: method {loaded[0]} needs the key 'model', the draft model or head to load"
        )
    for key, methods in (("model", LOADED), ("revision", LOADED), ("quantization", LOADED[:1])):
        if getattr(config, key) is not None and not set(methods) & set(loaded):
            raise ConfigError(f"{label}: {key} needs the method {' or '.join(methods)}")


def speculation_text(label: str, value: Any) -> Any:
    """The value of the option as JSON text, checked; None stays None.

    Raises:
        ConfigError: see `read_speculation`.
    """
    if value is None:
        return None
    given = json_object(label, value, EXAMPLE)
    read_speculation(label, given)
    return json.dumps(given, sort_keys=True)


def _methods(label: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError(f"{label}: expected one of {', '.join(METHODS)}, or a list of them, got {value!r}")
    for name in names:
        if name not in METHODS:
            why = NO_MTP if str(name).endswith("mtp") else REFUSED.get(str(name))
            if why is not None:
                raise ConfigError(f"{label}: {name}: {why}")
            near = suggestion(name, METHODS) if isinstance(name, str) else ""
            raise ConfigError(f"{label}: expected one of {', '.join(METHODS)}, got {name!r}{near}")
    return tuple(dict.fromkeys(names))


def _scheme(label: str, value: Any) -> str:
    if value not in QUANTIZATIONS:
        raise ConfigError(f"{label}: expected one of {', '.join(QUANTIZATIONS)}, got {value!r}")
    return str(value)


def _bytes(label: str, value: Any) -> int:
    try:
        size = parse_size(value) if isinstance(value, str) else whole_number(1, 1 << 50)(label, value)
    except ValueError as error:
        raise ConfigError(f"{label}: {error}" if not isinstance(error, ConfigError) else str(error)) from None
    return size


_READERS: Mapping[str, Reader] = {
    "method": _methods,
    "num_speculative_tokens": whole_number(1, MOST_TOKENS),
    "adaptive": switch,
    "prompt_lookup_min": whole_number(1, MOST_TOKENS),
    "prompt_lookup_max": whole_number(1, MOST_TOKENS),
    "suffix_max_bytes": _bytes,
    "model": text,
    "revision": text,
    "quantization": _scheme,
}
