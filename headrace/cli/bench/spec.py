"""Names of targets on the command line: ``headrace-static,max_num_seqs=16`` or ``peer=http://127.0.0.1:8001``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("headrace", "headrace-static", "transformers-static", "http")


class BadSpec(ValueError):
    """A target that cannot be parsed; the message shows the grammar."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One target; ``url`` is empty unless the kind is ``http``, and option values are text."""

    name: str
    kind: str
    url: str
    options: Mapping[str, str]


def parse(text: str) -> Spec:
    """Reads ``[NAME=]KIND[,KEY=VALUE...]`` where KIND is one of `KINDS` or a URL.

    Raises:
        BadSpec: an unknown kind or an option without a value.
    """
    head, *rest = text.split(",")
    named = re.fullmatch(r"([\w .-]+)=(.+)", head)
    name, kind = named.groups() if named else ("", head)
    url = kind if re.match(r"https?://", kind) else ""
    if not url and kind not in KINDS[:-1]:
        raise BadSpec(f"target {text!r}: expected a URL or one of {', '.join(KINDS[:-1])}")
    options = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise BadSpec(f"target {text!r}: expected KEY=VALUE, got {part!r}")
        options[key.replace("-", "_")] = value
    return Spec(name or text, "http" if url else kind, url, options)
