"""The contenders, each with the settings that its documentation recommends for throughput on a CPU.

A contender defines the files that it needs for a precision, the command that serves it, and the additional fields of
its requests. `MEANING` describes each precision, and is printed with every race.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.places import Places
from headrace.compute.device import device_facts

COMPUTED = "bfloat16" if device_facts(torch.device("cpu")).native_bfloat16 else "float32"
"""The dtype of activations where weights are in bfloat16: float32 if this CPU has no products of bfloat16, as all
contenders recommend then."""
_SHORT = {"bfloat16": "bf16", "float32": "f32"}[COMPUTED]
_OPENVINO_KV = {"bfloat16": "bf16", "float32": "f16"}[COMPUTED]
"""Two bytes an element, as those of Headrace. Beside float32 f16 was its fastest: f32 0.95, its default (u8) 0.98."""

MEANING: Mapping[str, Mapping[str, str]] = {
    "bf16": {
        "headrace": f"weights bf16, activations {_SHORT}, KV bf16",
        "vllm": f"weights, activations and KV {_SHORT}",
        "openvino": f"weights fp16 in the file, computed in {_SHORT}; KV {_OPENVINO_KV}",
        "llama.cpp": "weights BF16, activations bf16 or fp32 by operation; KV f16",
        "transformers": f"weights, activations and KV {_SHORT}",
        "transformers-static": f"weights, activations and KV {_SHORT}",
    },
    "int8": {
        "headrace": "W8A8: weights int8 by channel, activations int8 by token; KV bf16",
        "openvino": "weights int8 by channel, activations quantized as its plugin decides; KV its default (u8)",
        "llama.cpp": "Q8_0 (blocks of 32), activations Q8_0; KV f16",
    },
    "int4": {
        "headrace": "W4A8: weights int4 in groups of 64 or 128, activations int8 by token; KV bf16",
        "openvino": "weights int4 in groups of 64 (its int8 backup for the embedding); KV its default (u8)",
        "llama.cpp": "Q4_0 (blocks of 32; output matrix Q6_K), activations Q8_0; KV f16",
    },
}
"""Meaning of a precision for each contender; a contender that is not listed does not support it."""

BATCHED_TOKENS = 2048
"""Tokens of a step at most, for those that ask: prompts of 2,048 in one go, as llama.cpp's own default has it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The required capacity: ``rows`` concurrent requests of at most ``longest`` tokens, on ``threads`` cores.

    ``kv_token_bytes`` are those of a token in bfloat16.

    ``prefix_caching``: on where prompts begin alike; elsewhere it would only cost.
    """

    rows: int
    longest: int
    threads: int
    kv_token_bytes: int
    prefix_caching: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of all rows at maximum length, where they have the dtype that is computed in, plus a
        tenth for partly filled pages.
        """
        width = getattr(torch, COMPUTED).itemsize / torch.bfloat16.itemsize
        return int(1.1 * self.rows * self.longest * self.kv_token_bytes * width) + (64 << 20)


@dataclass(frozen=True, slots=True)
class Contender:
    """``prepare`` writes what is missing and returns what to serve; ``command`` serves it on a port.

    ``extra`` goes into every request's body; ``ready`` is the path that answers 200 once it can be asked;
    ``environment`` has variables of the server.
    """

    name: str
    prepare: Callable[[Places, Path, str], Path]
    command: Callable[[Places, Path, int, Demand, str], list[str]]
    extra: Mapping[str, Any]
    ready: str = "/health"
    environment: Callable[[Demand], Mapping[str, str]] = lambda demand: {}


def _as_it_is(places: Places, folder: Path, precision: str) -> Path:
    return folder


def headrace_server(model: Path, port: int) -> list[str]:
    """The command of a server on the CPU, to which settings are added."""
    return [
        *(sys.executable, "-m", "headrace", "serve", str(model), "--device", "cpu"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def _headrace(places: Places, model: Path, port: int, demand: Demand, precision: str) -> list[str]:
    few_bits = [] if precision == "bf16" else ["--quantization", {"int8": "int8", "int4": "w4a8"}[precision]]
    return [
        *headrace_server(model, port),
        *("--profile", "throughput", "--stream-interval", "1"),
        *("--max-num-seqs", str(demand.rows), "--max-model-len", str(demand.longest)),
        *("--kv-cache-memory-bytes", str(demand.kv_bytes), *few_bits),
    ]


def _vllm(places: Places, model: Path, port: int, demand: Demand, precision: str) -> list[str]:
    program = str(places.python("vllm").with_name("vllm"))
    return [
        *(program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", COMPUTED),
        *("--max-num-seqs", str(demand.rows), "--max-model-len", str(demand.longest)),
        *("--max-num-batched-tokens", str(max(BATCHED_TOKENS, demand.longest))),
        "--enable-prefix-caching" if demand.prefix_caching else "--no-enable-prefix-caching",
    ]


def _vllm_environment(demand: Demand) -> dict[str, str]:
    """Its memory for keys and values is set in whole GiB, and its threads by core: all of the race's."""
    cores = sorted(os.sched_getaffinity(0))[: demand.threads]
    return {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-demand.kv_bytes // (1 << 30))),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _converted(target: Path, command: Callable[[str], list[str]]) -> Path:
    """``target``, which a command makes unless it is there. It has its name once it is whole: what an interrupt leaves
    is made anew.
    """
    if not target.exists():
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # a file is written over
        subprocess.run(command(str(part)), check=True, stdout=subprocess.DEVNULL)
        part.replace(target)
    return target


def _gguf(places: Places, folder: Path, precision: str) -> Path:
    python, quantize = places.python("llama.cpp"), places.llama_cpp_build / "bin/llama-quantize"
    write = [str(python), "-m", "benchmarks.peers.gguf_file", folder.name, str(folder)]
    whole = _converted(folder / "bf16.gguf", lambda part: [*write, part])
    kind = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[precision]
    return _converted(folder / f"{precision}.gguf", lambda part: [str(quantize), str(whole), part, kind])


def _llama_cpp(places: Places, model: Path, port: int, demand: Demand, precision: str) -> list[str]:
    row_tokens = -(-(demand.longest + 1) // 256) * 256
    threads = str(demand.threads)
    return [
        *(str(places.llama_cpp_build / "bin/llama-server"), "--model", str(model), "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on"),
        *("--parallel", str(demand.rows), "--ctx-size", str(demand.rows * row_tokens), "--no-kv-unified"),
        *("--batch-size", str(BATCHED_TOKENS), "--ubatch-size", "512"),
        *([] if demand.prefix_caching else ["--cache-ram", "0"]),
    ]


def _openvino_model(places: Places, folder: Path, precision: str) -> Path:
    tool = places.python("openvino").with_name("optimum-cli")
    format_ = {"bf16": "fp16", "int8": "int8", "int4": "int4"}[precision]
    export = [str(tool), "export", "openvino", "--model", str(folder), "--weight-format", format_]
    export += ["--task", "text-generation-with-past"]
    export += ["--group-size", "64", "--ratio", "1.0", "--sym"] if precision == "int4" else []
    return _converted(folder / f"openvino-{precision}", lambda part: [*export, part])


def _options(demand: Demand, **more: Any) -> str:
    options = {
        "threads": demand.threads,
        "rows": demand.rows,
        "cache_bytes": demand.kv_bytes,
        "prefix_caching": demand.prefix_caching,
        "batched_tokens": BATCHED_TOKENS,
    }
    return json.dumps({**options, **more})


def _openvino(places: Places, model: Path, port: int, demand: Demand, precision: str) -> list[str]:
    options = _options(demand, compute=_SHORT, kv=_OPENVINO_KV if precision == "bf16" else "")
    python = str(places.python("openvino"))
    return [python, "-m", "benchmarks.peers.serve_openvino", str(model), str(port), options]


def _transformers(places: Places, model: Path, port: int, demand: Demand, precision: str) -> list[str]:
    module = "benchmarks.peers.serve_transformers"
    return [sys.executable, "-m", module, str(model), str(port), _options(demand, dtype=COMPUTED)]


CONTENDERS: Mapping[str, Contender] = {
    each.name: each
    for each in (
        Contender("headrace", _as_it_is, _headrace, {"return_token_ids": True}, "/health/ready"),
        Contender("vllm", _as_it_is, _vllm, {"return_token_ids": True}, environment=_vllm_environment),
        Contender("openvino", _openvino_model, _openvino, {}),
        Contender("llama.cpp", _gguf, _llama_cpp, {}),
        Contender("transformers", _as_it_is, _transformers, {}),
    )
}

IN_PROCESS = "transformers-static"
"""Padded batches are no server: they run in the client's process, without a wire."""
