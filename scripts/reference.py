"""Write `docs/reference/` from the code, so that it cannot tell another story: ``python scripts/reference.py``."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.build.server import BUILD_INFO_HELP, BUILD_INFO_LABELS
from headrace.config import ENVIRONMENT_PREFIX, PARTS
from headrace.observe.goodput import Goodput
from headrace.observe.http_requests import HttpRequests
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.vllm_names import ALIASES
from headrace.serve.http.generation.unsupported import CHAT, COMPLETIONS
from headrace.serve.http.openai.chat_wire import ChatBody
from headrace.serve.http.openai.completions_wire import CompletionBody
from headrace.serve.http.openapi import OPERATIONS
from headrace.serve.http.wire import Wire

FOLDER = Path(__file__).parent.parent / "docs" / "reference"


def options_page() -> str:
    """Every option: flag, values, default, meaning."""
    lines = [
        "# Options",
        "",
        "Each option has one name with four spellings: `--max-num-seqs 8` on the command line, `max-num-seqs: 8` in",
        f"a file given with `--config`, `{ENVIRONMENT_PREFIX}MAX_NUM_SEQS=8` in the environment, and",
        "`LLM(max_num_seqs=8)` in Python. The command line wins over the environment, which wins over the file.",
    ]
    for part, kind in PARTS.items():
        lines += ["", f"## {part.replace('_', ' ').capitalize()}", "", str(kind.__doc__), ""]
        lines += ["| option | values | default | meaning |", "|---|---|---|---|"]
        hints = get_type_hints(kind, include_extras=True)
        for each in fields(kind):
            value, info = get_args(hints[each.name])
            default = "" if each.default in (None, MISSING, ()) else f"`{each.default}`"
            flag = "MODEL" if each.name == "model" else f"--{each.name.replace('_', '-')}"
            if value is bool:
                flag = f"--[no-]{flag[2:]}"
            lines.append(f"| `{flag}` | {_type(value)} | {default} | {info.description} |")
    return "\n".join([*lines, ""])


def http_page() -> str:
    """Every route, the fields of the generating ones, and what is refused by name."""
    lines = ["# HTTP", "", "Access: what a route needs once API keys are configured, see"]
    lines += ["[security](../guide/security.md#roles).", "", "| route | access | what it does |", "|---|---|---|"]
    lines += [
        f"| `{each.method.upper()} {each.path}` | {each.access} | {each.summary} |" for each in OPERATIONS
    ]
    lines += [
        "| `GET /docs` | public | Interactive API documentation. |",
        "| `GET /openapi.json` | public | The OpenAPI document of the API. |",
    ]
    for title, body, refused in (
        ("Chat completions", ChatBody, CHAT),
        ("Completions", CompletionBody, COMPLETIONS),
    ):
        lines += ["", f"## {title}", "", "| field | type | meaning |", "|---|---|---|"]
        lines += list(_wire_rows(body))
        lines += [
            "",
            "Known to clients and refused by name until they exist (a value that asks for nothing passes): "
            + ", ".join(f"`{name}`" for name in sorted(refused))
            + ".",
        ]
    return "\n".join([*lines, ""])


def metrics_page() -> str:
    """Every metric of ``/metrics``."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` returns metrics in Prometheus' text format. Names begin with `headrace:`, or with the value of",
        "`--metrics-prefix`; `vllm` keeps existing dashboards and autoscalers working. Every metric has the label",
        "`model_name`.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    sheet = MetricsPage()
    Metrics(
        sheet,
        cache_config={"block_size": "16", "num_gpu_blocks": "1"},
        phase_seconds=lambda: {"forward": 0.0},
    )
    Goodput(sheet)
    HttpRequests(sheet)
    sheet.gauge("build_info", BUILD_INFO_HELP, BUILD_INFO_LABELS)
    for kind, families in (
        ("counter", sheet.counters),
        ("gauge", sheet.gauges),
        ("histogram", sheet.histograms),
    ):
        for family in families:
            suffix = "_total" if kind == "counter" else ""
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{family.name}{suffix}` | {kind} | {labels} | {family.help} |")
    lines += [
        "",
        "Metrics of the process and of Python's garbage collector have the names of prometheus-client and no prefix:",
        "`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and others.",
        "",
        "With `--metrics-prefix vllm`, every series also has the label `engine`, and these former names of vLLM exist:",
        "",
        "| alias | metric |",
        "|---|---|",
        *(f"| `vllm:{old}` | `vllm:{name}` |" for old, name in ALIASES.items()),
    ]
    return "\n".join([*lines, ""])


def _wire_rows(body: type[Wire]) -> Iterator[str]:
    properties: Mapping[str, Any] = body.model_json_schema()["properties"]
    for name, schema in properties.items():
        yield f"| `{name}` | {_schema_type(schema)} | {schema.get('description', '')} |"


def _schema_type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_schema_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema or "oneOf" in schema:
        return "object"
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _type(value: Any) -> str:
    if get_origin(value) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(value))
    if get_origin(value) in (Union, types.UnionType):
        return " or ".join(_type(each) for each in get_args(value) if each is not types.NoneType)
    if get_origin(value) is tuple:
        return f"{_type(get_args(value)[0])}, repeatable"
    return {int: "integer", float: "number", str: "text", bool: "switch"}[value]


PAGES = {"options.md": options_page, "http.md": http_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
