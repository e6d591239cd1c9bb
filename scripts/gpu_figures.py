"""Figures of a model on a GPU, beside the limit of the device and what the static model expects: for `gpu_check`.

Weights are random: speed depends on shapes. Each figure is written to a file at once, so an interrupted
run is continued by the next one. vLLM is measured by the same clients on the same requests as Headrace.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers.vocabulary import END, tokenizer
from headrace import LLM, SamplingParams
from headrace.lab.plan.launches import GRAPHS, TORCH, TRITON, Kernels, expected
from headrace.lab.plan.roofline import (
    DEVICES,
    KV_BYTES,
    SHAPES,
    WEIGHTS,
    DeviceSpec,
    ModelShape,
    Replica,
    chunk,
)

BUILTIN = ModelShape("builtin", 3, 256, 4, 2, 64, 768, 4096, tied_embeddings=True)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "sliding_window": 128,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
        },
    },
}
"""The configurations of models with experts, where they differ from those of dense ones."""


class Way(NamedTuple):
    """How a model is run: options of `LLM`, and the matching parameters of the static model."""

    options: dict[str, Any]
    kernels: Kernels = GRAPHS
    weights: str = "bfloat16"


WAYS = {
    "bf16": Way({"dtype": "bfloat16"}),
    "fp8, fp8 keys": Way({"quantization": "fp8", "kv_cache_dtype": "fp8"}, weights="int8"),
    "bf16, fp8 keys": Way({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "W4A16, int8 keys": Way({"quantization": "int4", "kv_cache_dtype": "int8"}, weights="int4"),
    "bf16, without graphs": Way({"dtype": "bfloat16", "enforce_eager": True}, TRITON),
    "bf16, torch": Way({"dtype": "bfloat16", "kernels": "torch"}, TORCH),
}


class Sizes(NamedTuple):
    """What is measured: decode steps of ``batches`` at ``contexts``, ``prompts``, and clients of a closed loop."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    prompts: tuple[int, ...]
    clients: tuple[int, ...]
    lengths: tuple[int, int]


ON_GPU = Sizes((1, 8, 64, 256), (128, 1024, 8192), 64, (2048, 8192), (32, 128, 256), (512, 128))
ON_CPU = Sizes((1, 3), (24,), 2, (40,), (2,), (16, 4))
"""Sizes that are small enough to test the script."""

TARGETS = {
    "llama-3.1-8b, bf16": {1: 240, 64: 9_300, 256: 17_800},
    "llama-3.1-8b, fp8, fp8 keys": {1: 425, 64: 17_000, 256: 34_000},
    "qwen3-0.6b, bf16": {1: 1_300, 256: 25_000},
}
"""Tokens per second to reach on an H200 at context 1,024, by batch. A prompt is to reach 474 TFLOP/s there, a step at
most 1.05 times its graph, and a start with compiled kernels at most 30 s."""

PROGRAM = (sys.executable, "-m", "headrace")
PORT = 18_437
UNFINISHED = 75
"""The exit status of a stage whose figures have not all been taken."""
VLLM = "clients of vLLM, "
"""The beginning of the names of stages that measure it."""


class Figures:
    """Figures by name, stored in a file; no new one is started after ``seconds``."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._end = time.monotonic() + seconds
        self.all: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def take(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and keep a figure that is not there yet.

        Raises:
            SystemExit: the time is over (status `UNFINISHED`); the figures so far are kept.
        """
        if name in self.all:
            return
        if time.monotonic() > self._end:
            raise SystemExit(UNFINISHED)
        self.all[name] = measure()
        self._file.write_text(json.dumps(self.all, indent=1) + "\n")
        print(name, self.all[name], flush=True)


def measurements(
    device: str, folder: Path, vllm: Path | None, figures: tuple[Path, float]
) -> dict[str, Callable[[], None]]:
    """Stages by name, the most important figures first; ``figures`` are the arguments of `Figures`."""
    found: dict[str, Callable[[], None]] = {}
    names = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-8b") if device == "cuda" else ("builtin",)
    for way in WAYS if device == "cuda" else ("bf16", "bf16, without graphs"):
        for name in names:
            if WAYS[way].kernels is GRAPHS or name == names[0]:  # the other ways need to be seen once
                found[f"steps, {name}, {way}"] = lambda name=name, way=way: measure_model(
                    name, way, device, folder, Figures(*figures)
                )
        for name in MIXTURES if way == "bf16" and device == "cuda" else ():
            found[f"steps, {name}, {way}"] = lambda name=name: measure_model(
                name, "bf16", device, folder, Figures(*figures)
            )
            found[f"kernels, {name}"] = lambda name=name: measure_kernels(name, "bf16", device, folder)
        if way == "bf16":
            for name in names:
                found[f"kernels, {name}"] = lambda name=name: measure_kernels(name, "bf16", device, folder)
            for name in names:
                found[f"offline, {name}"] = lambda name=name: measure_offline(
                    name, "bf16", device, folder, Figures(*figures)
                )
                found[f"clients, {name}"] = lambda name=name: measure_loops(
                    name, "bf16", device, folder, Figures(*figures)
                )
                if vllm is not None:
                    found[f"{VLLM}{name}"] = lambda name=name: measure_vllm(
                        vllm, name, device, folder, Figures(*figures)
                    )
    return dict(sorted(found.items(), key=lambda each: names[-1] in each[0]))  # the last model last


def folder_of(name: str, folder: Path) -> str:
    """A folder with the configuration and a vocabulary of a model, but no weights; the built-in model is its own."""
    if name == "builtin":
        return name
    shape, path = SHAPES[name], folder / name
    path.mkdir(parents=True, exist_ok=True)
    kind = ("qwen3", "Qwen3ForCausalLM") if shape.qk_norm else ("llama", "LlamaForCausalLM")
    config = {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 16_384,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        **MIXTURES.get(name, {}),
    }
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    files = {"config": config, "tokenizer": tokenizer(shape.vocab_size), "tokenizer_config": named}
    for file, content in files.items():
        (path / f"{file}.json").write_text(json.dumps(content))
    return str(path)


def options_of(name: str, way: str, device: str) -> dict[str, Any]:
    """Options with which a model is loaded, as keywords of `LLM`."""
    sizes = _sizes(device)
    given = {
        "device": device,
        "kernels": "triton" if device == "cuda" else "torch",
        "load_format": "dummy",
        "max_model_len": max(sizes.contexts + sizes.prompts) + sizes.steps + 16,
        "max_num_seqs": max(sizes.batches),
        **WAYS[way].options,
    }
    if name == "builtin":
        del given["load_format"]
        given["kv_cache_memory_bytes"] = 64 << 20
    return given


def measure_model(name: str, way: str, device: str, folder: Path, figures: Figures) -> None:
    """Decode steps and prompts of a model, offline."""
    sizes = _sizes(device)
    began = time.perf_counter()
    llm = LLM(folder_of(name, folder), **options_of(name, way, device))
    ready = time.perf_counter() - began
    ledger = llm.loaded.ledger
    start = {"device": llm.loaded.facts.name, "seconds": ready, "graphs": ledger.graphs or "none"}
    figures.take(f"{name}, {way}, start", lambda: start)
    room = ledger.num_blocks * ledger.block_size
    for context in sizes.contexts:
        for batch in sizes.batches:
            label = f"{name}, {way}, decode {batch} x {context}"
            if batch * (context + sizes.steps + 2 * ledger.block_size) > room:
                figures.take(label, lambda: {"left out": "the KV cache is too small"})
                continue
            figures.take(
                label,
                lambda batch=batch, context=context: _decode(llm, name, way, batch, context, sizes.steps),
            )
    for length in sizes.prompts:
        figures.take(
            f"{name}, {way}, prompt {length}", lambda length=length: _prefill(llm, name, way, length)
        )


def measure_kernels(name: str, way: str, device: str, folder: Path) -> None:
    """The device's time by kernel, for each batch at one context, and for a prompt."""
    llm, sizes = LLM(folder_of(name, folder), **options_of(name, way, device)), _sizes(device)
    context = sizes.contexts[-2:][0]
    for batch in sizes.batches:
        prompts = _prompts(batch, context)
        _seconds(llm, prompts, 2)
        _print_kernels(
            f"decode {batch} x {context}", sizes.steps, partial(_seconds, llm, prompts, 1 + sizes.steps)
        )
    length = sizes.prompts[0]
    _seconds(llm, _prompts(1, length), 1)
    _print_kernels(f"prompt {length}", 1, partial(_seconds, llm, _prompts(1, length), 1))


def _prompts(count: int, length: int) -> list[list[int]]:
    """New random prompts."""
    drawn = random.SystemRandom()
    return [[drawn.randrange(3, 4000) for _ in range(length)] for _ in range(count)]


def _seconds(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, progress=False)
    seconds = time.perf_counter() - began
    for output in outputs:
        if len(output.outputs[0].token_ids) != tokens:
            raise SystemExit(f"FAILED: {output.outputs[0]}")
    return seconds


def _decode(llm: LLM, name: str, way: str, batch: int, context: int, steps: int) -> dict[str, Any]:
    """A decode step: the difference of two runs over the same cached prompts."""
    prompts = _prompts(batch, context)
    _seconds(llm, prompts, 2)
    short = _seconds(llm, prompts, 2)
    step = (_seconds(llm, prompts, 2 + steps) - short) / steps
    told = WAYS[way]
    model = expected(_replica(name, way), told.kernels, batch, context, told.options.get("quantization"))
    target = TARGETS.get(f"{name}, {way}", {}).get(batch) if context == 1024 else None
    graph = _graph_seconds(llm, prompts, steps) if llm.loaded.ledger.graphs else None
    return {
        "ms": 1000 * step,
        "tokens/s": batch / step,
        "limit ms": 1000 * model.limit,
        "expected ms": 1000 * model.seconds,
        "share of limit": model.limit / step,
        **({} if target is None else {"target tokens/s": target}),
        **({} if graph is None else {"graph ms": 1000 * graph, "of its graph": step / graph}),
    }


def _graph_seconds(llm: LLM, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """The device's time for a decode step by a graph: the median of those of a run over cached prompts."""
    graphs: Any = llm.loaded.runner._graphs
    replays, marks = graphs._replays, []

    def timed(replay: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            marks.append((begin, end))

        return run

    graphs._replays = {variant: timed(replay) for variant, replay in replays.items()}
    try:
        _seconds(llm, prompts, 2 + steps)
    finally:
        graphs._replays = replays
    if not marks:
        raise SystemExit("FAILED: graphs were recorded, but no step took one")
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks) / 1000


def _prefill(llm: LLM, name: str, way: str, length: int) -> dict[str, Any]:
    """The shortest of three prompts that are not cached."""
    seconds = min(_seconds(llm, _prompts(1, length), 1) for _ in range(3))
    flops = _replica(name, way).flops(chunk(0, length, last=True))
    return {"ms": 1000 * seconds, "tokens/s": length / seconds, "TFLOP/s": flops / seconds / 1e12}


def _replica(name: str, way: str) -> Replica:
    told = WAYS[way]
    kv_bytes = KV_BYTES["int8" if told.options.get("kv_cache_dtype") else "bfloat16"]
    shape = BUILTIN if name == "builtin" else SHAPES[name]
    weights = "mxfp4" if "quantization_config" in MIXTURES.get(name, {}) else told.weights
    return Replica(shape, _spec(), precision=WEIGHTS[weights]._replace(kv_bytes=kv_bytes))


def _spec() -> DeviceSpec:
    """The device whose limit is shown: an H200 if this one is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((spec for spec in DEVICES.values() if spec.name in name), DEVICES["H200"])


def measure_offline(name: str, way: str, device: str, folder: Path, figures: Figures) -> None:
    """As many requests as the largest of `measure_loops`, without HTTP."""
    command = ["throughput", folder_of(name, folder), *_words(options_of(name, way, device))]
    requests = 3 * max(_sizes(device).clients)
    figures.take(f"{name}, {way}, offline", lambda: _bench(command, requests, device, folder))


def measure_loops(name: str, way: str, device: str, folder: Path, figures: Figures) -> None:
    """Closed loops of clients over HTTP."""
    words = _words(options_of(name, way, device))
    command = [*PROGRAM, "serve", folder_of(name, folder), "--port", str(PORT), *words]
    _clients(f"{name}, {way}", command, ("/health/ready", 100), device, folder, figures)


def measure_vllm(python: Path, name: str, device: str, folder: Path, figures: Figures) -> None:
    """The same closed loops with vLLM's server, in bfloat16 with its own defaults beside the limits of the model."""
    options = options_of(name, "bf16", device)
    words = {each: options[each] for each in ("dtype", "max_model_len", "max_num_seqs")}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", folder_of(name, folder)]
    command += ["--load-format", "dummy", "--port", str(PORT), *_words(words)]
    _clients(f"{name}, bf16, vLLM", command, ("/health", 270), device, folder, figures)


def _clients(
    label: str,
    command: Sequence[str],
    ready: tuple[str, float],
    device: str,
    folder: Path,
    figures: Figures,
) -> None:
    """Closed loops with a server, whose output is kept in a file; ``ready``: the path that answers then, and the most
    seconds until it does.
    """
    left = [clients for clients in _sizes(device).clients if f"{label}, {clients} clients" not in figures.all]
    if not left:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        began = time.monotonic()
        if not _is_ready(server, *ready):
            raise SystemExit(f"FAILED: not ready: {(folder / 'server.log').read_text()[-3000:]}")
        figures.take(f"{label}, server", lambda: {"seconds": time.monotonic() - began})
        base = ["serve", "--base-url", f"http://127.0.0.1:{PORT}", "--max-concurrency"]
        for clients in left:
            figures.take(
                f"{label}, {clients} clients",
                lambda clients=clients: _bench([*base, str(clients)], 3 * clients, device, folder),
            )
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):  # then it is killed with the stage
            server.wait(30)


def _bench(command: Sequence[str], requests: int, device: str, folder: Path) -> dict[str, Any]:
    """The numbers of a benchmark of so many requests, which differ from those of other numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    report, (prompt, output) = folder / "loop.json", _sizes(device).lengths
    work = ["--dataset-name", "fixed", "--input-len", str(prompt), "--output-len", str(output)]
    given = [*command, *work, "--num-prompts", str(requests)]
    given += ["--workload-seed", str(requests), "--output", str(report)]
    subprocess.run([*PROGRAM, "bench", *given], check=True)
    summary = json.loads(report.read_text())["runs"][0]["summary"]
    return {key: value for key, value in summary.items() if isinstance(value, int | float)}


def _sizes(device: str) -> Sizes:
    return ON_GPU if device == "cuda" else ON_CPU


def _words(options: dict[str, Any]) -> list[str]:
    """Options as on the command line."""
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def _is_ready(server: subprocess.Popen[bytes], path: str, seconds: float) -> bool:
    """Wait until the server is ready; false if it ended, or is not ready in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def table(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """All figures as lines of a table."""
    columns = ("ms", "graph ms", "limit ms", "expected ms", "share of limit", "tokens/s", "target tokens/s")
    yield "| what | " + " | ".join(columns) + " | other |"
    yield "|---|" + "---:|" * len(columns) + "---|"
    for name, figure in figures.items():
        cells = [f"{figure[column]:,.3g}" if column in figure else "" for column in columns]
        rest = ", ".join(
            f"{key} {value if isinstance(value, str) else f'{value:,.4g}'}"
            for key, value in figure.items()
            if key not in columns
        )
        yield f"| {name} | {' | '.join(cells)} | {rest} |"


MOST_KERNELS = 14


def _print_kernels(what: str, steps: int, work: Callable[[], object]) -> None:
    """Run ``work`` and print its kernels, the longest first, in microseconds per step of ``steps``."""
    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    kernels = sorted(profiled.key_averages(), key=_microseconds, reverse=True)
    busy = sum(map(_microseconds, kernels))
    print(f"{what}: {1e6 * seconds / steps:,.0f} us per step, the device computes for {busy / steps:,.0f}")
    for each in kernels[:MOST_KERNELS]:
        spent, calls = _microseconds(each) / steps, each.count / steps
        print(f"{spent:11,.1f} us in {calls:6.1f} calls: {each.key[:100]}", flush=True)


def _microseconds(kernel: FunctionEventAvg) -> float:
    on_device = torch.cuda.is_available()
    return float(kernel.self_device_time_total if on_device else kernel.self_cpu_time_total)
