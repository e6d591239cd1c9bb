"""One page of the pages of several models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

LABEL = "model_name"

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (.*)")
_LABEL_VALUE = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def joined_metrics(pages: Iterable[tuple[str, str]]) -> str:
    """Prometheus' pages of several models, by name, as one: each family stands once, with the series of all.

    Series of a process, which name no model, get its label.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for model, page in pages:
        samples: list[str] = []
        for line in page.splitlines():
            if line.startswith("# "):
                _, _, family, *_ = line.split(" ", 3)
                heads, samples = families.setdefault(family, ([], []))
                if line not in heads:
                    heads.append(line)
            elif line:
                samples.append(_labelled(line, model))
    return "".join(f"{line}\n" for parts in families.values() for lines in parts for line in lines)


def _labelled(line: str, model: str) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    name, labels, value = found.groups()
    if labels and re.search(rf'(?:^|,){LABEL}="', labels):
        return line
    label = f'{LABEL}="{model.translate(_LABEL_VALUE)}"'
    return f"{name}{{{label}{',' + labels if labels else ''}}} {value}"


def joined_lists(bodies: Iterable[bytes]) -> dict[str, Any]:
    """Lists of models as one; the first card of an id counts, as models of several processes may have one name."""
    pages: list[dict[str, Any]] = [json.loads(body) for body in bodies]
    cards: dict[str, Any] = {}
    for page in pages:
        for card in page["data"]:
            cards.setdefault(card["id"], card)
    joined: dict[str, Any] = dict(pages[0]) if pages else {"object": "list"}
    joined["data"] = list(cards.values())
    if "last_id" in joined:  # Anthropic's form
        joined["last_id"] = next(reversed(cards), None)
    return joined
