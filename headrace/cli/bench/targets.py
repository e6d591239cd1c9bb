"""Targets of ``headrace bench``: engines in this process, padded batches, servers behind a URL."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.cli.connection import plain as _plain
from headrace.cli.connection import server_root, uses_proxies
from headrace.config import ConfigError, ModelOptions, Options, SchedulerOptions, options

if TYPE_CHECKING:
    from headrace.core.engine import Engine
    from headrace.core.request import Request
    from headrace.lab.bench.latency import StepTimes, Stopwatch
    from headrace.lab.bench.stats import Target
    from headrace.lab.workload.work import Prompt


def read_spec(text: str) -> Spec:
    """A target as a command line names it; see `parse`.

    Raises:
        ConfigError: it cannot be parsed.
    """
    try:
        return parse(text)
    except BadSpec as error:
        raise ConfigError(str(error)) from None


def make_target(spec: Spec, given: Options) -> Target:
    """The target of a spec. An engine has the command's own options, overridden by those of the spec.

    Raises:
        ConfigError: an option that the target does not have, or that cannot work.
    """
    own: dict[str, Any] = dict(spec.options)
    if spec.kind == "http":
        model, key = own.pop("model", ""), own.pop("api_key", "")
        concurrency = _count(spec, "concurrency", own.pop("concurrency")) if "concurrency" in own else None
        _refuse_rest(spec, own)
        return make_server_target(spec.name, spec.url, model, key, concurrency=concurrency)
    if spec.kind == "transformers-static":
        batch_size = _batch_size(spec)
        _refuse_rest(spec, {name: text for name, text in own.items() if name != "batch_size"})
        return _padded_target(spec.name, batch_size, given.model)
    return _engine_target(spec.name, _engine_options(spec, given))


def target_rows(spec: Spec, given: Options) -> int | None:
    """Number of concurrent requests of a target; None for a server, which does not report it."""
    if spec.kind == "http":
        return None
    if spec.kind == "transformers-static":
        return _batch_size(spec)
    return _engine_options(spec, given).scheduler.max_num_seqs


def make_server_target(
    name: str,
    url: str,
    model: str,
    api_key: str = "",
    extra_body: str = "{}",
    concurrency: int | None = None,
    before: Callable[[], object] = lambda: None,
) -> Target:
    """A server as a target; ``model`` defaults to its first model. ``before`` is called before every run.

    Raises:
        ConfigError: the URL is invalid, no server responds, or ``extra_body`` is not a JSON object.
    """
    import httpx

    from headrace.lab.bench.client import Connections, Endpoint, ServerTarget

    try:
        extra = dict(json.loads(extra_body))
    except (ValueError, TypeError):
        raise ConfigError(f"--extra-body: expected a JSON object, got {extra_body!r}") from None
    try:
        Connections(url)  # connects to nothing, but checks the address
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not model:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            answer = httpx.get(f"{server_root(url)}/v1/models", headers=headers, trust_env=uses_proxies(url))
            model = answer.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ConfigError(f"{url} names no model: {_plain(error)}") from None
    endpoint = Endpoint(url, model, api_key, extra)
    return ServerTarget(name, endpoint, concurrency, before, _served_kernels(url, api_key))


def _served_kernels(url: str, api_key: str) -> str:
    """The kernels of a Headrace server and their instruction set; empty if the server does not report them."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = f"{server_root(url)}/server_info"
    try:
        answer = httpx.get(address, headers=headers, trust_env=uses_proxies(url))
        found = answer.raise_for_status().json()
        return " ".join(str(found[name]) for name in ("kernels", "isa") if found.get(name))
    except (httpx.HTTPError, ValueError, AttributeError, TypeError, KeyError):
        return ""


def side_by_side(plans: SchedulerOptions, rows: int) -> SchedulerOptions:
    """Options for a batch of ``rows`` requests that first prefill, without limits that favour decoding, and then decode
    together.
    """
    rows = max(rows, plans.max_num_seqs)
    return dataclasses.replace(plans, max_num_seqs=rows, mixed_prefill_ratio=0.0, max_step_seconds=0.0)


def check_lengths(input_len: int, output_len: int, most: int) -> None:
    """Raises `ConfigError` if a prompt and its output exceed the ``most`` tokens of a sequence."""
    if input_len + output_len > most:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len}: a sequence has at most {most} tokens "
            "(--max-model-len)"
        )


def time_batch(
    engine: Engine,
    stopwatch: Stopwatch,
    phases: Callable[[], Mapping[str, float]],
    requests: Sequence[Request],
) -> list[StepTimes]:
    """Runs requests as one batch and times their steps.

    Raises:
        ConfigError: they do not fit.
    """
    from headrace.lab.bench.latency import NotOneBatch, time_steps

    try:
        return time_steps(engine, stopwatch, phases, requests)
    except NotOneBatch:
        raise ConfigError(
            f"--batch-size {len(requests)} did not run as one batch: the KV cache holds fewer requests "
            "(--kv-cache-memory-bytes), or the first ended before the last began (--output-len)"
        ) from None


def _engine_options(spec: Spec, given: Options) -> Options:
    static = {"scheduling_policy": "static"} if spec.kind == "headrace-static" else {}
    return options({**_changed(given), **spec.options, **static})


def _engine_target(name: str, given: Options) -> Target:
    from headrace.lab.bench.engine import EngineTarget
    from headrace.lab.workload.work import is_chat
    from headrace.wiring.model import close, load

    loaded = load(given)

    def encode(prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(loaded.tokenizer.encode(prompt))
        if is_chat(prompt):
            rendered = loaded.template.render([message._asdict() for message in prompt])
            return tuple(loaded.tokenizer.encode_prompt(rendered))
        return prompt  # type: ignore[return-value]

    engine = loaded.engine
    return EngineTarget(
        name,
        engine,
        encode,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        before=engine.reset_prefix_cache,
        close=lambda: close(loaded),
        kernels=loaded.computed_by,
    )


def _padded_target(name: str, batch_size: int, model: ModelOptions) -> Target:
    """Padded batches with the same weights, device and data type as the engine."""
    from headrace.compute.checkpoint import ModelError
    from headrace.compute.device import device_facts, resolve_device, resolve_dtype
    from headrace.compute.model.hub import resolve_folder
    from headrace.lab.bench.static_batching import TransformersStatic
    from headrace.wiring.loading.computing import find_model

    try:
        folder = resolve_folder(model.model, model.revision)
        declared = find_model(model, folder).shape.dtype
    except ModelError as error:
        raise ConfigError(str(error)) from error
    device = resolve_device(model.device)
    choice = resolve_dtype(model.dtype, declared, device_facts(device))
    return TransformersStatic(
        name,
        str(folder),
        batch_size,
        dtype=str(choice.dtype).removeprefix("torch."),
        device=device.type,
        dummy=model.load_format == "dummy",
    )


def _batch_size(spec: Spec) -> int:
    return _count(spec, "batch_size", spec.options.get("batch_size", "16"))


def _count(spec: Spec, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"target {spec.name}: {name}: expected a number of at least 1, got {text!r}")
    return int(text)


def _refuse_rest(spec: Spec, rest: Mapping[str, str]) -> None:
    if rest:
        raise ConfigError(f"target {spec.name}: {spec.kind} has no option {', '.join(rest)}")


def _changed(given: Options) -> dict[str, Any]:
    """Option values by name, without those that are the default."""
    default = Options()
    return {
        name: value
        for part in ("model", "cache", "scheduler")
        for name, value in dataclasses.asdict(getattr(given, part)).items()
        if name != "profile"
        and value != getattr(getattr(default, part), name)  # its settings are listed one by one
    }


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
