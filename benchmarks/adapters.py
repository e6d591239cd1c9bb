"""Many LoRA adapters through a few places, beside vLLM's CPU build: ``python -m benchmarks.adapters --home FOLDER``.

Both servers have the same base (SmolLM2-135M's shape, dummy weights), the same random adapters on disk, and the same
requests: clients in a closed loop, each request with an adapter drawn by Zipf's law and a prompt of token ids. vLLM is
that of ``python -m benchmarks.peers install``. With ``--folder`` the files stay for the next run, and ``--server`` runs
one of both, so that short runs can alternate.

``--steps`` needs no vLLM: 32 sequences decode with Llama 3.2 1B's shape, without ``--enable-lora``, with it and no
adapter, and with eight adapters of rank 16. The three take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.weights import write_config
from benchmarks.stage import free_port
from headrace import LLM, LoRARequest, SamplingParams
from headrace.lab.bench.stats import percentile

BASE = replace(SHAPES["smollm2-135m"], vocabulary=4096, positions=2048)
STEPS_BASE = replace(SHAPES["llama-3.2-1b"], vocabulary=4096, positions=2048)
ROWS, STEPS = 32, 16
RANK, PROMPT, OUTPUT = 16, 64, 32
PORT = free_port()
SERVERS = ("headrace", "vllm")


def write_adapters(folder: Path, count: int, base: Shape = BASE) -> list[Path]:
    """Random adapters of all linear layers."""
    hidden, inner, narrow = base.hidden, base.intermediate, base.kv_heads * base.head_dim
    wide = base.heads * base.head_dim
    sizes = {"q_proj": (wide, hidden), "k_proj": (narrow, hidden), "v_proj": (narrow, hidden)}
    attention = sizes | {"o_proj": (hidden, wide)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["target_modules"] = [*attention, *mlp]
    found = [folder / f"adapter{number}" for number in range(count)]
    for number, place in enumerate(found):
        if (place / "adapter_config.json").exists():
            continue
        generator, tensors = torch.Generator().manual_seed(number), {}
        for layer in range(base.layers):
            for block, linears in (("self_attn", attention), ("mlp", mlp)):
                for name, (outputs, inputs) in linears.items():
                    stem = f"base_model.model.model.layers.{layer}.{block}.{name}.lora_"
                    for which, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                        values = torch.randn(shape, generator=generator) * 0.01
                        tensors[f"{stem}{which}.weight"] = values.bfloat16()
        place.mkdir(exist_ok=True)
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(config))
    return found


def time_steps(folder: Path, rounds: int) -> None:
    """Print the time of decode steps of the three cases, over that of the first."""
    base = str(write_config(STEPS_BASE, folder / "base-of-steps"))
    requests = [LoRARequest(each.name, 1, str(each)) for each in write_adapters(folder, 8, STEPS_BASE)]
    given: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "enable_prefix_caching": False}
    given |= {"max_num_seqs": ROWS, "max_model_len": 64, "kv_cache_memory_bytes": 256 << 20}
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    prompts = [[5 + row] for row in range(ROWS)]
    with LLM(base, **given) as plain, LLM(base, enable_lora=True, max_loras=8, **given) as able:
        asked = [requests[row % 8] for row in range(ROWS)]
        cases = (("off", plain, None), ("no adapter", able, None), ("8 adapters", able, asked))
        took: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in cases}
        for number in range(rounds + 1):  # the first round is not counted
            for name, llm, adapters in cases[number % 3 :] + cases[: number % 3]:
                clock, cpu = time.perf_counter(), time.process_time()
                llm.generate(prompts, params, lora_request=adapters, progress=False)
                took[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    for name, each in took.items():
        ratios = [
            sorted(one[which] / other[which] for one, other in zip(each[1:], took["off"][1:], strict=True))
            for which in (0, 1)
        ]
        seconds = median(clock for clock, _ in each[1:])
        shown = (f"{median(of):.3f} ({of[0]:.3f} to {of[-1]:.3f})" for of in ratios)
        print(
            f"{name}: {1000 * seconds / STEPS:.1f} ms a step; over off: clock {next(shown)}, CPU {next(shown)}"
        )


def command_of(
    server: str, home: Path, base: Path, adapters: Sequence[Path], places: int, kept: int
) -> list[str]:
    """How a server is started."""
    first = {
        "headrace": [sys.executable, "-m", "headrace"],
        "vllm": [str(home / "vllm" / "venv" / "bin" / "vllm")],
    }[server]
    own = {
        "headrace": ["--kv-cache-memory-bytes", "1GiB", "--stream-interval", "1"],
        "vllm": ["--max-num-batched-tokens", "2048", "--enforce-eager"],
    }[server]
    return [
        *(*first, "serve", str(base), "--host", "127.0.0.1", "--port", str(PORT), "--load-format", "dummy"),
        *(
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "512",
            "--max-num-seqs",
            "16",
            "--no-enable-prefix-caching",
        ),
        *(
            "--enable-lora",
            "--max-loras",
            str(places),
            "--max-cpu-loras",
            str(kept),
            "--max-lora-rank",
            str(RANK),
        ),
        *("--lora-modules", *(f"{each.name}={each}" for each in adapters), *own),
    ]


@contextmanager
def started(command: Sequence[str], log: Path, wait: float) -> Iterator[None]:
    """A server that answers."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | settings | {"VLLM_NO_USAGE_STATS": "1"}
        )
        try:
            until = time.monotonic() + wait
            while not _answers():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{command[0]} does not answer; its log is {log}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait()


def _answers() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def drive(names: Sequence[str], clients: int, seconds: float) -> str:
    """Tokens a second and the first token's latency of a closed loop."""
    weights = [1 / (rank + 1) for rank in range(len(names))]
    first: list[float] = []
    tokens, until = 0, time.monotonic() + seconds

    async def client(number: int, http: httpx.AsyncClient) -> None:
        nonlocal tokens
        draw = random.Random(number)
        while time.monotonic() < until:
            (name,) = draw.choices(names, weights)
            prompt = [draw.randrange(3, BASE.vocabulary) for _ in range(PROMPT)]
            body = {"model": name, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
            began, seen = time.monotonic(), False
            async with http.stream("POST", "/v1/completions", json=body | {"temperature": 0.0}) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and not seen:
                        first.append(time.monotonic() - began)
                        seen = True
            tokens += OUTPUT

    began = time.monotonic()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=None) as http:
        await asyncio.gather(*(client(number, http) for number in range(clients)))
    elapsed = time.monotonic() - began
    late = [percentile(first, percent) for percent in (50, 99)]
    return f"{len(first)} requests, {tokens / elapsed:.1f} tokens/s, TTFT p50 {late[0]:.2f} s, p99 {late[1]:.2f} s"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, metavar="ROUNDS", help="Time decode steps alone, so many times.")
    parser.add_argument("--home", type=Path, help="Folder of `benchmarks.peers`, with vLLM.")
    parser.add_argument("--adapters", type=int, default=200, help="Number of adapters (default 200).")
    parser.add_argument("--places", type=int, default=8, help="--max-loras of both servers (default 8).")
    parser.add_argument("--kept", type=int, default=16, help="--max-cpu-loras of both servers (default 16).")
    parser.add_argument("--clients", type=int, default=16, help="Clients in a closed loop (default 16).")
    parser.add_argument("--seconds", type=float, default=40, help="Seconds of each run (default 40).")
    parser.add_argument("--rounds", type=int, default=1, help="Runs of each server, in turn (default 1).")
    parser.add_argument(
        "--wait", type=float, default=600, help="Seconds that a start may take (default 600)."
    )
    parser.add_argument(
        "--folder", type=Path, help="Folder of base and adapters, which stay (default: a new one)."
    )
    parser.add_argument("--server", choices=SERVERS, help="The only server that runs (default: both).")
    given = parser.parse_args()
    if given.home is None and given.steps is None:
        parser.error("give --home or --steps")
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as folder:
        if given.steps is not None:
            time_steps(Path(folder), given.steps)
            return
        base = write_config(BASE, Path(folder) / "base")
        adapters = write_adapters(Path(folder), given.adapters)
        names = [each.name for each in adapters]
        for _ in range(given.rounds):
            for server in [given.server] if given.server else SERVERS:
                command = command_of(server, given.home, base, adapters, given.places, given.kept)
                began = time.monotonic()
                with started(command, Path(tempfile.gettempdir()) / f"adapters-{server}.log", given.wait):
                    ready = time.monotonic() - began
                    asyncio.run(drive(names, given.clients, 5))  # the first steps of a server are slow
                    result = asyncio.run(drive(names, given.clients, given.seconds))
                print(f"{server}: {result}; ready after {ready:.0f} s", flush=True)


if __name__ == "__main__":
    main()
