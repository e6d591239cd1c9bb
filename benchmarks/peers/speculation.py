"""Speculative decoding of each engine at batch 1, on the same weights and requests: tokens per second.

The weights are those of the built-in model and its draft model, because drafts of random weights would all be wrong.
With ``--shape`` both have the sizes of published models (`benchmarks.drafts.widened`). Each engine is served without
drafts, with drafts from the text (prompt lookup, n-grams), and with the draft model; servers are stopped while another
one runs.

- ``chats``: stories that the model writes.
- ``again``: the same question is repeated in a chat, so that the prompt contains the answer.

The answers are greedy and exactly ``--output-len`` tokens long. Some peers can only return an answer as a whole, so
Headrace sends its tokens in large parts. A figure is the median over rounds, with the slowest and
the fastest one beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from benchmarks.drafts.widened import write_pair
from benchmarks.peers.contenders import CONTENDERS, headrace_server
from benchmarks.peers.install import NotInstalled, version
from benchmarks.peers.places import Places
from benchmarks.peers.server import StoppedServer, exit_on_signals, first_tokens, start
from benchmarks.peers.shapes import WIDENED
from benchmarks.stage import free_port, say
from headrace import LLM, SamplingParams
from headrace.compute.model.hub import resolve_folder
from headrace.lab.bench.report import Run, compare
from headrace.lab.workload.work import Work

ENGINES = ("headrace", "openvino", "llama.cpp", "transformers")
METHODS = ("none", "lookup", "draft")
NAMES = ("Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Sara", "Leo", "Emma", "Jack")
LONGEST = 2048
NGRAM = 3
"""Tokens that llama.cpp looks up, as many as OpenVINO does at most. Its default of 12 finds little in short texts."""


class Folders(NamedTuple):
    """The folders of the target and of its draft model, with what an engine needs of each."""

    target: Path
    draft: Path


def prepared(places: Places, shape: str | None) -> Folders:
    """The built-in models, at a published size or their own, as folders to which conversions are added."""
    if shape:
        return Folders(*write_pair(shape, places.home / "models"))
    folders = Folders(places.model("builtin-target"), places.model("builtin-draft"))
    for folder, name in zip(folders, ("builtin", "builtin-draft"), strict=True):
        if not (folder / "model.safetensors").exists():
            shutil.copytree(resolve_folder(name), folder, dirs_exist_ok=True)
    return folders


def command(
    engine: str, method: str, folders: Folders, places: Places, port: int, cores: int, tokens: int
) -> list[str]:
    """What serves an engine with a method of drafting.

    Raises:
        NotInstalled: this version of it does not have the method.
    """
    target, draft = folders
    if engine == "headrace":
        drafts = {"lookup": {"method": "ngram"}, "draft": {"method": "draft_model", "model": str(draft)}}
        return [
            *headrace_server(target, port),
            *("--stream-interval", "64", "--max-num-seqs", "1"),
            *("--max-model-len", str(LONGEST), "--no-enable-prefix-caching"),
            *(["--speculative-config", json.dumps(drafts[method])] if method in drafts else []),
        ]
    target, draft = (CONTENDERS[engine].prepare(places, folder, "bf16") for folder in folders)
    if engine == "llama.cpp":
        program = str(places.llama_cpp_build / "bin/llama-server")
        return [
            *(program, "--model", str(target), "--port", str(port), "--parallel", "1"),
            *("--ctx-size", str(LONGEST), "--threads", str(cores), "--threads-batch", str(cores)),
            *("--flash-attn", "on", "--cache-ram", "0"),
            *_llama_cpp_drafts(program, method, draft, tokens),
        ]
    given = {"threads": cores, "method": method, "draft": str(draft), "tokens": tokens}
    python = str(places.python("openvino")) if engine == "openvino" else sys.executable
    return [python, "-m", "benchmarks.peers.serve_alone", engine, str(target), str(port), json.dumps(given)]


def _llama_cpp_drafts(program: str, method: str, draft: Path, tokens: int) -> list[str]:
    """The flags of drafting, whose names depend on the version."""
    if method == "none":
        return []
    known = subprocess.run([program, "--help"], check=True, capture_output=True, text=True).stdout
    most = "--spec-draft-n-max" if "--spec-draft-n-max" in known else "--draft-max"
    if method == "draft":  # newer versions load a draft model, and use it only with this flag
        use = ["--spec-type", "draft-simple"] if "draft-simple" in known else []
        return ["--model-draft", str(draft), most, str(tokens), *use]
    if "--spec-ngram-simple-size-n" not in known:
        raise NotInstalled("this llama.cpp has no drafts from n-grams")
    sizes = ["--spec-ngram-simple-size-n", str(NGRAM), "--spec-ngram-simple-size-m", str(tokens)]
    return ["--spec-type", "ngram-simple", *sizes]


def works(folder: Path, kind: str, count: int, length: int) -> list[Work]:
    """The requests of a kind, as token ids."""
    with LLM(str(folder), dtype="bfloat16", max_model_len=LONGEST) as llm:
        encode, made = llm.tokenizer.encode, []
        for number in range(count):
            question = f"Tell me a short story about {NAMES[number % len(NAMES)]}."
            text = f"<|bos|><|user|>{question}<|end|><|assistant|>"
            if kind == "again":
                params = SamplingParams(temperature=0.0, max_tokens=length)
                answer = llm.generate(encode(text, add_special_tokens=False), params, progress=False)[0]
                text += f"{answer.outputs[0].text}<|end|><|user|>{question}<|end|><|assistant|>"
            tokens = tuple(encode(text, add_special_tokens=False))
            made.append(Work(f"{kind}{number}", tokens, length, ignore_eos=True))
    return made


def started(
    stack: ExitStack, folders: Folders, places: Places, args: argparse.Namespace
) -> Iterator[StoppedServer]:
    """The servers that could be started; the others are reported."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.cores), "HF_HUB_OFFLINE": "1"}
    for engine in args.engines:
        try:
            say(f"{engine}: {version(places, engine)}")
        except NotInstalled as error:
            say(f"left out: {error}")
            continue
        for method, number in itertools.product(args.methods, args.tokens):
            chosen = method != "none" and engine != "headrace"  # by us, and not by the engine
            if not chosen and number != args.tokens[0]:
                continue
            name, port = f"{engine}, {method}" + (f" {number}" if chosen else ""), free_port()
            contender = CONTENDERS[engine]
            try:
                flags = command(engine, method, folders, places, port, args.cores, number)
                running = start(name, flags, port, contender.ready, 1, environment, contender.extra)
            except (NotInstalled, RuntimeError) as error:
                say(f"left out: {name}: {str(error)[-800:]}")
                continue
            yield stack.enter_context(closing(running))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--shape", choices=tuple(WIDENED), help="the built-in models at a published size")
    parser.add_argument("--kinds", nargs="+", choices=("chats", "again"), default=["chats", "again"])
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4, 8],
        help="numbers of tokens that peers draft at a time; each is served",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("bench-results") / "peers-speculation.json")


def run(args: argparse.Namespace, places: Places) -> None:
    """Measure, print, write."""
    exit_on_signals()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    folders, found = prepared(places, args.shape), {}
    loads = {kind: works(folders.target, kind, args.requests, args.output_len) for kind in args.kinds}
    with ExitStack() as stack:
        servers = list(started(stack, folders, places, args))
        for kind, load in loads.items():
            first = []
            for running in servers:
                with running.turn():
                    first.append(first_tokens(running.endpoint, load[0]))
                running.run(load)  # warms up
            rounds = compare(servers, load, args.rounds, finished=_report_failures).rounds
            speeds = {
                runs[0].target: [run.summary.output_tokens_per_second for run in runs]
                for runs in zip(*rounds, strict=True)
            }
            found[kind] = speeds
            for (name, each), tokens in zip(speeds.items(), first, strict=True):
                equal = itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(tokens, first[0], strict=False)
                )
                say(
                    f"{kind}: {name:22} {statistics.median(each):8.1f} tokens/s ({min(each):.1f} to {max(each):.1f});"
                    f" the first answer's first {sum(1 for _ in equal)} of {len(first[0])} tokens as"
                    f" {servers[0].name}"
                )
            best = {engine: _best(speeds, engine) for engine in args.engines}
            peers = max((best[engine] for engine in best if engine != "headrace"), default=0.0)
            if best.get("headrace") and peers:
                say(f"{kind}: best of headrace to the best peer: {best['headrace'] / peers:.2f}x")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    say(f"written: {args.output}")


def _report_failures(number: int, run: Run) -> None:
    for record in run.records:
        if record.error:
            say(f"{run.target}: {record.error}")


def _best(speeds: Mapping[str, Sequence[float]], engine: str) -> float:
    """The median of an engine's fastest method; 0 if it did not race."""
    own = [statistics.median(each) for name, each in speeds.items() if name.split(", ")[0] == engine]
    return max(own, default=0.0)
