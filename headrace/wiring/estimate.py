"""Estimates what the caches of a server would save on a log of requests: its tokenizer and rules, without its weights.

request_log → api.batch.estimate (render, encode, constrain) → response_cache.estimate → Estimated
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.api.batch.estimate import LoggedRequest, NotEstimated, NoTexts, compile_call, read_log
from headrace.api.batch.lines import BadLine
from headrace.api.compile.markers import chosen
from headrace.api.compile.model import Dialect, ServedModel
from headrace.api.compile.policies import PromptPolicy, Rules
from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.sentences import PairJudge, Sentences
from headrace.compute.grammar.compiler import Compiler
from headrace.config import ConfigError, Options
from headrace.lab.simulate.runner import Device, StepWork
from headrace.observe.trace_file import MAGIC
from headrace.response_cache.estimate import Estimate, Tally
from headrace.response_cache.semantic.opening import SemanticParts, judged
from headrace.service.sampling_defaults import DefaultsError
from headrace.text.parsing.catalogue import UnknownParser
from headrace.text.rendering import TemplateError
from headrace.text.tokenizer import TokenizerError
from headrace.wiring.loading.computing import find_model
from headrace.wiring.loading.text import load_text
from headrace.wiring.model import served_names
from headrace.wiring.simulation import Machine
from headrace.wiring.tenants import read_tenants

if TYPE_CHECKING:
    from headrace.core.ports import Embedder
    from headrace.response_cache.rules.judge import Judge
    from headrace.response_cache.semantic.estimate import SimilarInLog

UNKNOWN_BLOCKS = 1 << 16
"""Blocks of the KV cache if no machine is named: a million tokens in blocks of 16."""

MOST_BLOCKS = 1 << 17
"""Blocks that are remembered; about 1.5 KB each."""

MOST_REPORTED = 100
"""Lines that are reported one by one."""


class LineProblem(NamedTuple):
    """A line that was left out."""

    line: int
    message: str


class Near(NamedTuple):
    """How near duplicates are estimated. ``certified``: by a calibration. ``missing``: why they are not estimated."""

    encoder: str = ""
    certified: bool = False
    least_cosine: float | None = None
    missing: str = ""


@dataclass(slots=True)
class Estimated:
    """The result over a file. ``lengths_known`` requests have a logged output length."""

    tally: Tally
    near: Near
    kv_tokens: int
    forgotten: int = 0
    requests: int = 0
    lengths_known: int = 0
    left_out: int = 0
    problems: list[LineProblem] = field(default_factory=list)


class SharedDevice:
    """`response_cache.estimate.DeviceTimes` of a device that decodes ``concurrency`` sequences together.

    A prompt takes the time that it adds to a step of the other sequences. An output takes its part of its steps.
    """

    def __init__(self, device: Device, concurrency: int) -> None:
        self._device = device
        self._rows = concurrency

    def seconds(self, prompt: int, cached: int, output: float) -> float:
        context = prompt + int(output / 2)
        decode = max(0.0, output - 1) * self._decoding(self._rows, context) / self._rows
        return self._prefill(prompt, cached, context) + decode

    def latency(self, prompt: int, output: float) -> float:
        """Seconds from the first step of a request to its last."""
        context = prompt + int(output / 2)
        return self._prefill(prompt, 0, context) + max(0.0, output - 1) * self._decoding(self._rows, context)

    def _decoding(self, rows: int, context: int) -> float:
        return self._device.seconds(StepWork(rows, rows, rows * context, rows * context, rows))

    def _prefill(self, prompt: int, cached: int, context: int) -> float:
        others, tokens = self._rows - 1, prompt - cached
        attended = (cached + 1 + prompt) * tokens // 2
        step = StepWork(
            others + 1,
            others + tokens,
            others * context + attended,
            others * context + prompt,
            others + 1,
        )
        alone = self._decoding(others, context) if others else 0.0
        return self._device.seconds(step) - alone


class Assumed(NamedTuple):
    """What the log does not say: the ``tenant`` of all requests, the length of outputs, the decoding batch."""

    tenant: str | None = None
    output_len: int | None = None
    concurrency: int = 16
    min_similarity: float = 0.8


def estimate(
    path: Path,
    options: Options,
    machine: Machine | None,
    assumed: Assumed,
    read: Callable[[int], None],
) -> Estimated:
    """Estimate on the requests of ``path``; ``read`` receives the number of each line or row that was read.

    Raises:
        ConfigError: the file or the model cannot be read, or an option cannot be used.
    """
    model, grammars = text_model(options)
    try:
        near, similar = _similar(options, assumed.min_similarity)
        block_size = options.cache.block_size
        blocks = UNKNOWN_BLOCKS if machine is None else min(MOST_BLOCKS, machine.kv_tokens // block_size)
        times = None if machine is None else SharedDevice(machine.device, assumed.concurrency)
        fold = Estimate(
            ttl=options.response_cache.response_cache_ttl,
            num_blocks=blocks,
            block_size=block_size,
            similar=similar,
            certified=near.certified,
            times=times,
        )
        found = Estimated(fold.tally, near, blocks * block_size)
        asyncio.run(_fold(path, options, model, assumed, fold, found, read))
        found.forgotten = fold.forgotten
    except NoTexts as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    finally:
        grammars.close()
    if not found.requests:
        first = f"; first: {found.problems[0].message}" if found.problems else ""
        raise ConfigError(f"{path}: no request could be used, {found.left_out} lines are wrong{first}")
    return found


async def _fold(
    path: Path,
    options: Options,
    model: ServedModel,
    assumed: Assumed,
    fold: Estimate,
    found: Estimated,
    read: Callable[[int], None],
) -> None:
    server = options.server
    for line in read_log(path, server.max_body_bytes, MAGIC):
        read(line.number)
        if isinstance(line, BadLine):
            _leave_out(found, line.number, line.message)
            continue
        try:
            call = await compile_call(
                model,
                line,
                tenant=assumed.tenant,
                output_len=assumed.output_len,
                similar=not found.near.missing,
                request_timeout=server.request_timeout,
            )
        except NotEstimated as error:
            _leave_out(found, line.number, f"line {line.number}: {error}")
            continue
        fold.add(call)
        _count(found, line)


def _count(found: Estimated, line: LoggedRequest) -> None:
    found.requests += line.times
    found.lengths_known += line.times if line.output_tokens is not None else 0


def _leave_out(found: Estimated, line: int, message: str) -> None:
    found.left_out += 1
    if len(found.problems) < MOST_REPORTED:
        found.problems.append(LineProblem(line, message))


def text_model(options: Options) -> tuple[ServedModel, Compiler]:
    """The served model as the API sees it, of tokenizer and config alone, and its compiler of grammars, to be closed.

    Raises:
        ConfigError: the model cannot be read, or an option cannot be used.
    """
    given, server, plans = options.model, options.server, options.scheduler
    try:
        text = load_text(dataclasses.replace(given, load_format="dummy"), server.tool_call_parser)
        shape = find_model(given, text.path).shape
        dialect = Dialect(text.template, server.tool_call_parser, server.reasoning_parser)
        markers = chosen(server.normalize_prompts)
    except (ModelError, TokenizerError, TemplateError, DefaultsError, UnknownParser) as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"--normalize-prompts: {error}") from None
    tenants, classes = read_tenants(plans.tenants)
    tokenizer = text.tokenizer
    grammars = Compiler(tokenizer.backend.to_str, shape.vocab_size, tuple(tokenizer.eos_token_ids))
    names = served_names(given)
    model = ServedModel(
        names[0],
        tokenizer,
        text.template,
        given.max_model_len or shape.max_positions,
        shape.vocab_size,
        rules=Rules(plans.scheduling_policy, {each.name: each for each in classes}, tenants),
        dialect=dialect,
        also_named=(*names[1:], given.model),
        grammars=grammars,
        prompts=PromptPolicy(markers),
        trust_request_chat_template=server.trust_request_chat_template,
        defaults=text.defaults,
    )
    return model, grammars


def _similar(options: Options, least_cosine: float) -> tuple[Near, SimilarInLog | None]:
    """The semantic cache: by the calibration, or else every pair that is similar enough.

    Without an encoder, near duplicates are not estimated, unless an option names it or a calibration.

    Raises:
        ConfigError: the calibration or a named encoder cannot be used.
    """
    given = options.semantic
    encoder: Embedder
    judge: Judge | None = None
    try:
        from headrace.response_cache.semantic.estimate import Alike, SimilarInLog

        if given.semantic_calibration is None:
            encoder = Sentences.from_name(given.semantic_encoder)
        else:
            encoder, judge, _ = judged(dataclasses.replace(given, semantic_cache="serve"), _parts())
    except (ImportError, ModelError) as error:
        why = "pip install 'headrace[semantic]'" if isinstance(error, ImportError) else str(error)
        if {"semantic_encoder", "semantic_calibration"} & options.chosen:
            raise ConfigError(f"--semantic-encoder: {why}") from error
        return Near(missing=why), None
    near = Near(encoder.name, judge is not None, least_cosine if judge is None else None)
    return near, SimilarInLog(encoder, judge or Alike(least_cosine), given.semantic_cache_bytes)


def _parts() -> SemanticParts:
    """What a judge is made of; nothing is proposed or spelled."""
    return SemanticParts(
        encoder=lambda name: Sentences.from_name(name),
        judge=lambda name: PairJudge.from_name(name),
        proposes=False,
        spell=str,
        seed=0,
    )
