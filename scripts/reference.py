"""Generate `docs/reference/` from the code, so that the two cannot differ: ``python scripts/reference.py``."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

import headrace
from headrace.api.anthropic.wire import MESSAGES, MessagesBody
from headrace.api.auth.access import Access
from headrace.api.compile.bodies import CHAT, COMPLETIONS, ChatBody, CompletionBody
from headrace.api.openapi import described
from headrace.api.responses.wire import RESPONSES, ResponsesBody
from headrace.api.wire import Wire
from headrace.cli import app
from headrace.cli.help import lines_of
from headrace.compute.encoder.families import SUPPORTED as ENCODERS
from headrace.compute.images.families import FAMILIES as IMAGE_FAMILIES
from headrace.compute.model.families import COMPOSITES, FAMILIES, TEXT_TYPES
from headrace.config import ENVIRONMENT_PREFIX, PARTS, TITLES, ConfigError
from headrace.core.memory.departure import PromptMemory
from headrace.core.plan import TokenLogprob
from headrace.core.request import InvalidParameter
from headrace.lab.plan.roofline import H100, KV_BYTES, SHAPES, WEIGHTS, Replica
from headrace.llm import RequestMetrics
from headrace.notebook import Simulation, Trace, load_trace, make_trace, simulate
from headrace.observe.cache_metrics import ImageCounts, ImageMetrics
from headrace.observe.cost.ledger import CostLedger, CostMeter
from headrace.observe.cost.prices import Pricing
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import AdapterRequests, HttpRequests, Metrics, Traffic
from headrace.observe.metrics_page import ALIASES, MetricsPage
from headrace.observe.prefixes import PrefixBook
from headrace.observe.resources import ResourceMeter
from headrace.observe.work import ModelWork, Peaks, WorkMeter
from headrace.wiring.observability import BUILD_INFO_HELP, BUILD_INFO_LABELS
from headrace.wiring.tuning import CLASS_FLOOR_HELP, CLASS_WEIGHT_HELP

LABORATORY = (
    *("bench throughput", "bench latency", "bench serve", "bench compare", "bench sweep", "bench calibrate"),
    *("bench roofline", "simulate", "plan", "tune", "cache estimate"),
)
"""The commands whose own flags have a page."""

FOLDER = Path(__file__).parent.parent / "docs" / "reference"

TESTED = {
    "LlamaForCausalLM": (
        "Llama 2, Llama 3.x, SmolLM2",
        "built-in (3.4 M); shapes of SmolLM2-135M and Llama-3.2-1B",
    ),
    "MistralForCausalLM": ("Mistral", ""),
    "MinistralForCausalLM": ("Ministral 8B", ""),
    "Qwen2ForCausalLM": ("Qwen 2, Qwen 2.5", ""),
    "Qwen3ForCausalLM": ("Qwen 3 (dense)", "shape of Qwen3-0.6B"),
    "Phi3ForCausalLM": ("Phi-3, Phi-4-mini", ""),
    "GemmaForCausalLM": ("Gemma 1, CodeGemma", ""),
    "Gemma2ForCausalLM": ("Gemma 2", ""),
    "VaultGemmaForCausalLM": ("VaultGemma", ""),
    "Gemma3ForCausalLM": ("Gemma 3, text models", ""),
    "Gemma4ForCausalLM": ("Gemma 4 E2B, E4B, 31B, text models (26B-A4B is computed by transformers)", ""),
    "CwmForCausalLM": ("CWM", ""),
    "DeepseekV3ForCausalLM": ("DeepSeek-V3, R1; latent keys and values", ""),
    "Ernie4_5ForCausalLM": ("ERNIE 4.5 (dense)", ""),
    "Exaone4ForCausalLM": ("EXAONE 4.0", ""),
    "GlmForCausalLM": ("GLM-4-9B (2024), GLM-Edge", ""),
    "Glm4ForCausalLM": ("GLM-4-0414 (9B, 32B), GLM-Z1", ""),
    "GraniteForCausalLM": ("Granite 3.x (dense)", ""),
    "HeliumForCausalLM": ("Helium", ""),
    "HunYuanDenseV1ForCausalLM": ("Hunyuan (dense)", ""),
    "HyperCLOVAXForCausalLM": ("HyperCLOVA X SEED", ""),
    "Olmo2ForCausalLM": ("OLMo 2", ""),
    "Olmo3ForCausalLM": ("OLMo 3", ""),
    "BambaForCausalLM": ("Bamba", ""),
    "GraniteMoeHybridForCausalLM": ("Granite 4", ""),
    "FalconH1ForCausalLM": ("Falcon-H1", ""),
    "NemotronHForCausalLM": ("Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano", ""),
    "Lfm2ForCausalLM": ("LFM2, LFM2.5", ""),
    "Lfm2MoeForCausalLM": ("LFM2-8B-A1B", ""),
    "Qwen3NextForCausalLM": ("Qwen3-Next", ""),
    "Qwen3_5ForCausalLM": ("Qwen3.5, 3.6 (dense), text models", "shape of Qwen3.5-0.8B"),
    "Qwen3_5MoeForCausalLM": ("Qwen3.5, 3.6 with experts, text models", ""),
    "GptOssForCausalLM": ("gpt-oss-20b, gpt-oss-120b", ""),
    "GraniteMoeForCausalLM": ("Granite 3.x MoE (1B-A400M, 3B-A800M)", ""),
    "Glm4MoeLiteForCausalLM": ("GLM-4.7-Flash; latent keys and values", ""),
    "Glm4MoeForCausalLM": ("GLM-4.5, 4.6, 4.7", ""),
    "MiniMaxM2ForCausalLM": ("MiniMax-M2", ""),
    "MixtralForCausalLM": ("Mixtral", ""),
    "OlmoeForCausalLM": ("OLMoE", ""),
    "Qwen2MoeForCausalLM": ("Qwen1.5-MoE, Qwen2-57B-A14B", ""),
    "Qwen3MoeForCausalLM": ("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", "layers of Qwen3-30B-A3B's sizes"),
    "SeedOssForCausalLM": ("Seed-OSS", ""),
    "SmolLM3ForCausalLM": ("SmolLM3", ""),
}
"""Models of each family, and the largest sizes that were run beside the small random models of the tests."""

TEXT_PARTS = {
    "DeepseekVLForConditionalGeneration": "DeepSeek-VL",
    "DeepseekVLHybridForConditionalGeneration": "DeepSeek-VL 7B",
    "Exaone4_5_ForConditionalGeneration": "EXAONE 4.5",
    "Gemma3ForConditionalGeneration": "Gemma 3, ShieldGemma 2",
    "Gemma4ForConditionalGeneration": "Gemma 4",
    "GotOcr2ForConditionalGeneration": "GOT-OCR 2, PP-Chart2Table",
    "GraniteDoclingForConditionalGeneration": "Granite Docling",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "HyperCLOVA X SEED Vision",
    "Idefics2ForConditionalGeneration": "Idefics 2",
    "Idefics3ForConditionalGeneration": "Idefics 3",
    "InternVLForConditionalGeneration": "InternVL 2.5, 3, 3.5 (in transformers' format)",
    "LightOnOcrForConditionalGeneration": "LightOnOCR",
    "LlavaForConditionalGeneration": "LLaVA 1.5, Pixtral",
    "LlavaNextForConditionalGeneration": "LLaVA-NeXT",
    "LlavaNextVideoForConditionalGeneration": "LLaVA-NeXT-Video",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2",
    "Ovis2ForConditionalGeneration": "Ovis 2",
    "PaddleOCRVLForConditionalGeneration": "PaddleOCR-VL",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5, 3.6 (dense)",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-35B-A3B and larger, 3.6",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL (dense)",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL-30B-A3B and larger",
    "SmolVLMForConditionalGeneration": "SmolVLM",
    "VideoLlama3ForConditionalGeneration": "VideoLLaMA 3",
    "VideoLlavaForConditionalGeneration": "Video-LLaVA",
    "VipLlavaForConditionalGeneration": "ViP-LLaVA",
}
"""Models that also read images, of which the text part is served."""

FAMILY_OF = {
    "llama": "Llama", "smollm2": "Llama", "qwen2.5": "Qwen 2", "qwen3": "Qwen 3", "mistral": "Mistral",
    "phi-3": "Phi-3", "gemma-2": "Gemma 2", "gemma-3": "Gemma 3", "gpt-oss": "gpt-oss",
}  # fmt: skip
"""Family of a shape by the beginning of its name."""

GUIDE = FOLDER.parent / "guide" / "security.md"

CONTEXT = 8192
GIB = 1 << 30


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


def commands_page() -> str:
    """The laboratory's commands with their own flags; those of the configuration are on the page of options."""
    root = typer.main.get_command(app)
    lines = [
        "# Commands of the laboratory",
        "",
        "These commands measure, simulate, plan, tune and estimate. Where a command loads or simulates an engine, it",
        "also takes the [options](options.md) of model, KV cache and scheduler. `headrace COMMAND --help` prints the",
        "same.",
    ]
    for name in LABORATORY:
        command: Any = root
        for part in name.split():
            command = command.commands[part]
        found = list(lines_of(command, typer.Context(command, info_name=name)))
        shared = {  # the parts of the configuration that the command takes whole; a model is an argument
            TITLES[part]
            for part, kind in PARTS.items()
            if sum(line.group == TITLES[part] for line in found) >= len(fields(kind)) - 1
        }
        lines += [
            "",
            f"## headrace {name}",
            "",
            _paragraphs(command.help or ""),
            "",
            "| flag | meaning |",
            "|---|---|",
        ]
        for line in found:
            loaded = line.name == "model" and TITLES["model"] in shared
            if line.group not in shared and not loaded and line.name not in ("config", "help"):
                lines.append(f"| `{_escaped(line.spelling)}` | {_escaped(line.text)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def http_page() -> str:
    """Every route, the fields of the generating ones, and what is refused by name."""
    lines = ["# HTTP", "", "Access: what a route needs once API keys are configured, see"]
    lines += [
        "[security](../guide/security.md#roles).",
        "",
        "| route | access | what it does |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{row.method} {row.shown_path}` | {row.access} | {row.summary} |"
        for row in described()
        if row.summary
    ]
    for title, body, refused in (
        ("Chat completions", ChatBody, CHAT),
        ("Completions", CompletionBody, COMPLETIONS),
        ("Responses", ResponsesBody, RESPONSES),
        ("Messages", MessagesBody, MESSAGES),
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


def with_access_table(guide: str) -> str:
    """``guide`` with the current routes of each access in its table."""
    paths: dict[str, dict[str, None]] = {}
    for row in described():
        paths.setdefault(row.access, {})[f"`{row.shown_path}`"] = None
    return re.sub(
        rf"^\| ({'|'.join(Access)}) \| `/.*$",
        lambda line: f"| {line[1]} | {', '.join(paths[line[1]])} |",
        guide,
        flags=re.MULTILINE,
    )


class _Measured:
    """A placeholder for resource sources that this machine may not have."""

    measurable = measures_energy = True

    def __getattr__(self, name: str) -> Any:
        return lambda: None


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
    AdapterRequests(sheet, 1, str, float)
    ImageMetrics(sheet, lambda: ImageCounts(0, 0, 0, 0.0))
    HttpRequests(sheet)
    ledger, nothing = CostLedger(Pricing()), _Measured()
    CostMeter(sheet, ledger, float)
    WorkMeter(sheet, ledger, ModelWork(1, 1, 1, 1, 1), float, slots=1, peaks=Peaks(1.0, 1.0))
    Traffic(sheet)
    ResourceMeter(sheet, int, nothing, nothing, nothing)
    PrefixBook(PromptMemory(0), 16, sheet)
    sheet.gauge("build_info", BUILD_INFO_HELP, BUILD_INFO_LABELS)
    sheet.gauge("class_weight", CLASS_WEIGHT_HELP, ["class"])
    sheet.gauge("class_floor", CLASS_FLOOR_HELP, ["class"])
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
        "With `--metrics-prefix vllm`, every series also has the label `engine`, and these names of vLLM exist too:",
        "",
        "| alias | metric |",
        "|---|---|",
        *(f"| `vllm:{old}` | `vllm:{name}` |" for old, name in ALIASES.items()),
    ]
    return "\n".join([*lines, ""])


def python_page() -> str:
    """The public classes and functions: signatures, fields and docstrings."""
    public = [getattr(headrace, name) for name in headrace.__all__ if not name.startswith("__")]
    order = sorted(public, key=lambda each: (not each.__name__.endswith("LLM"), each.__name__))
    lines = [
        "# Python API",
        "",
        "These names are public. Import the first ones from `headrace`, the others from the module that is named.",
        "[Run offline](../guide/offline.md), [Embed in Python](../guide/embedding.md) and",
        "[Extend](../guide/extending.md) have examples.",
    ]
    simulation = [load_trace, make_trace, simulate, Trace, Simulation]
    for each in [*order, RequestMetrics, TokenLogprob, InvalidParameter, ConfigError, *simulation]:
        home = "headrace" if each in public else _home(each)
        lines += [
            "",
            f"## {each.__name__}",
            "",
            f"`from {home} import {each.__name__}`",
            "",
            _docstring(each),
        ]
        if isinstance(each, type):
            lines += [*_fields(each), *_methods(each)]
        else:
            lines += ["", "```text", _signature(each.__name__, each), "```"]
    return "\n".join([*lines, ""])


def _home(documented: Any) -> str:
    """The module to import something from: the package of its module, if that exports it."""
    package = documented.__module__.rpartition(".")[0]
    exported = getattr(import_module(package), "__all__", ())
    return package if documented.__name__ in exported else documented.__module__


def _docstring(documented: object) -> str:
    """A docstring as Markdown: Google's sections become lists, double backticks single ones."""
    text = inspect.getdoc(documented) or ""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    lines: list[str] = []
    for line in text.splitlines():
        section = re.fullmatch(r"(Args|Returns|Raises|Yields):", line)
        if section:
            lines += [f"**{section[1]}**", ""]
        elif re.match(r"    \S", line):
            lines.append(f"- {line.strip()}")
        elif line.startswith("     "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _fields(kind: type) -> Iterator[str]:
    """A table of a dataclass's or named tuple's fields."""
    hints = getattr(kind, "__annotations__", {})
    if is_dataclass(kind):
        defaults = {each.name: _default(each) for each in fields(kind)}
    elif hasattr(kind, "_fields"):
        defaults = dict.fromkeys(kind._fields, "")
    else:
        return
    yield from ["", "| field | type | default |", "|---|---|---|"]
    for name, default in defaults.items():
        kind_shown = str(getattr(hints[name], "__forward_arg__", hints[name])).replace("|", "\\|")
        yield f"| `{name}` | `{kind_shown}` | {default} |"


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return f"`{each.default!r}`"
    return f"`{each.default_factory()!r}`" if each.default_factory is not MISSING else ""


def _methods(kind: Any) -> Iterator[str]:
    """Signature and docstring of each public method, the constructor first; of a function its signature."""
    if inspect.isfunction(kind):
        yield from ["", "```text", _signature(kind.__name__, kind), "```"]
        return
    if issubclass(kind, Exception) or is_dataclass(kind) or hasattr(kind, "_fields"):
        return
    for name, method in vars(kind).items():
        if callable(method) and (name == "__init__" or not name.startswith("_")):
            called = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
            yield from ["", f"### {called}", "", "```text", _signature(called, method), "```"]
            if name != "__init__":
                yield from ["", _docstring(method)]


def _signature(called: str, method: object) -> str:
    """A call as it is written, a parameter a line, annotations without the quotes of postponed evaluation."""
    signature = inspect.signature(method)  # type: ignore[arg-type]
    taken = [each for name, each in signature.parameters.items() if name != "self"]
    parameters = list(map(str, taken))
    keywords = [place for place, each in enumerate(taken) if each.kind is each.KEYWORD_ONLY]
    if keywords and taken[keywords[0] - 1].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters.insert(keywords[0], "*")
    returns = signature.return_annotation
    returns = "" if returns in (None, "None", signature.empty) and "." not in called else f" -> {returns}"
    inside = (
        "".join(f"\n    {each}," for each in parameters) + "\n"
        if len(parameters) > 2
        else ", ".join(parameters)
    )
    unquoted = re.sub(r": '([^']*)'", r": \1", inside)
    return f"{called}({unquoted}){returns}"


def models_page() -> str:
    """Families, and the memory that well-known models need by precision."""
    lines = [
        "# Model compatibility",
        "",
        "The name under `architectures` in `config.json` decides how a model is computed.",
        "[Models](../guide/models.md) describes formats and dtypes.",
        "",
        "## Native families",
        "",
        "Every family is tested against `transformers` with small random weights: logits, greedy text, chunked",
        "prefill. Larger sizes in the last column were run in benchmarks, with random weights unless they are the",
        "built-in model.",
        "",
        "| `architectures` | models | tested with |",
        "|---|---|---|",
    ]
    types = json.loads((FOLDER.parent / "data" / "models.json").read_text())["types"]
    seeing = {each.get("architecture") for each in types if each["kind"] in IMAGE_FAMILIES}
    for name in FAMILIES:
        models, larger = TESTED[name]
        lines.append(f"| `{name}` | {models} | small random weights{f'; {larger}' if larger else ''} |")
    lines += [
        "",
        "## Text part of image models",
        "",
        "These models also read images. Headrace serves the text model of all of them: it computes text prompts as the",
        "whole model does. Those with a yes take [images](../guide/images.md); the others reject them. Audio and video",
        "are rejected. The `model_type` of the `text_config` must be one of",
        f"{', '.join(f'`{kind}`' for kind in TEXT_TYPES)}.",
        "",
        "| `architectures` | models | images |",
        "|---|---|---|",
        *(f"| `{name}` | {TEXT_PARTS[name]} | {'yes' if name in seeing else ''} |" for name in COMPOSITES),
    ]
    lines += ["", *_embedding_models(), "", *_types_of_transformers(), ""]
    lines += [*_memory_of_weights(), "", *_memory_of_contexts()]
    return "\n".join([*lines, ""])


def _embedding_models() -> list[str]:
    """Models that embed, rerank and score; the table after it is about generation only."""
    kinds = ", ".join(f"`{kind}`" for kind in ENCODERS)
    return [
        "## Embedding and reranking models",
        "",
        "`/v1/embeddings`, `/v1/rerank` and `/v1/score` are served by these models; see",
        "[Embeddings and reranking](../guide/embeddings.md).",
        "",
        "| kind | models |",
        "|---|---|",
        f"| encoders, by `model_type` | {kinds} |",
        "| cross-encoders | the encoders above as `*ForSequenceClassification` with one label |",
        "| decoders | every native family above, for example Qwen3-Embedding |",
        "",
        "The next table is about generation. A type that is rejected there may still be an encoder here, and a",
        "`BertLMHeadModel` there is a decoder, not an embedding model.",
    ]


def _types_of_transformers() -> list[str]:
    """The recorded verdict on each model type of transformers: see `scripts/model_coverage.py`."""
    record = json.loads((FOLDER.parent / "data" / "models.json").read_text())
    types = record["types"]
    lines = [
        "## Model types of transformers",
        "",
        f"A tiny random checkpoint of each type of transformers {record['transformers']} was loaded with",
        "`--model-impl auto` in float32. A result that names the implementation means: logits of a row as a whole and",
        "in chunks differ by less than 0.001 from those of `transformers`, and greedy texts of three rows in one batch",
        "agree. Types for images are judged with text input. `python scripts/model_coverage.py` repeats it.",
        "",
        "| types | equal, native | equal, transformers | rejected at start | wrong | no tiny checkpoint |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for use in dict.fromkeys(each["use"] for each in types):
        found = Counter((each["verdict"], each.get("by", "")) for each in types if each["use"] == use)
        by = [found["equal", "native"], found["equal", "transformers"]]
        rest = [
            sum(n for (v, _), n in found.items() if v == verdict)
            for verdict in ("refused", "wrong", "not built")
        ]
        lines.append(f"| {use} | {' | '.join(map(str, by + rest))} |")
    lines += ["", "| model type | `architectures` | for | result |", "|---|---|---|---|"]
    for each in types:
        why = each.get("why", "").partition(": ")[2] if each["verdict"] == "refused" else ""
        named = {"equal": each.get("by", ""), "refused": f"rejected: {_cell(why)}"}
        result = named.get(each["verdict"], each["verdict"])
        lines.append(f"| `{each['kind']}` | `{each.get('architecture', '')}` | {each['use']} | {result} |")
    return [line.replace("| `` |", "|  |") for line in lines]


def _cell(text: str) -> str:
    """Text of another library as a cell of a table."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())[:140]


def _memory_of_weights() -> list[str]:
    lines = [
        "## Memory for weights",
        "",
        "Estimates of `headrace plan`, in GiB, with the LM head in 8 bits as `--quantization` stores it.",
        "In bfloat16 on a CPU, the C++ kernels keep a copy of a tied LM head. The server prints its own figure.",
        "The last column is for experts in MXFP4, as gpt-oss stores them, beside other weights in bfloat16.",
        "",
        "| model | family | parameters, billion | bfloat16, GiB | int8, GiB | int4, GiB | mxfp4, GiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES.values():
        family = next(FAMILY_OF[each] for each in FAMILY_OF if shape.name.startswith(each))
        fitting = [each for each in WEIGHTS.values() if each.expert_bytes is None or shape.sparse]
        sizes = [Replica(shape, H100, precision=each).weight_bytes / GIB for each in fitting]
        cells = " | ".join([*(f"{size:.2f}" for size in sizes), *[""] * (len(WEIGHTS) - len(sizes))])
        lines.append(f"| `{shape.name}` | {family} | {shape.num_parameters / 1e9:.2f} | {cells} |")
    return lines


def _memory_of_contexts() -> list[str]:
    lines = [
        "## Memory for contexts",
        "",
        f"KV cache of one token, and of one request of {CONTEXT:,} tokens, by `--kv-cache-dtype`. The last column is",
        "the least that serves such a request: bfloat16 weights, KV cache, and the activations of a step of",
        f"{CONTEXT:,} tokens.",
        "",
        "| model | bfloat16, KiB/token | int8, KiB/token | bfloat16, GiB/request | int8, GiB/request | total, GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES.values():
        kinds = [shape.kv_bytes_per_token(each) for each in KV_BYTES.values()]
        replica = Replica(shape, H100)
        total = replica.weight_bytes + replica.workspace_bytes(CONTEXT, 1) + CONTEXT * kinds[0]
        cells = [f"{kind / 1024:.1f}" for kind in kinds] + [f"{kind * CONTEXT / GIB:.2f}" for kind in kinds]
        lines.append(f"| `{shape.name}` | {' | '.join(cells)} | {total / GIB:.2f} |")
    return lines


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


PAGES = {
    "options.md": options_page,
    "commands.md": commands_page,
    "http.md": http_page,
    "metrics.md": metrics_page,
    "python.md": python_page,
    "models.md": models_page,
}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    GUIDE.write_text(with_access_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
