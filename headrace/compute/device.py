"""What this machine has, and what of it is used: device, dtype, threads, free memory.

The files of the operating system are read here and nowhere else in `compute`. Knows no model; sizes come from
`ledger`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch

from headrace.config import ConfigError

ResultT = TypeVar("ResultT")

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NATIVE_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_NOTED_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_tile", "amx_int8", "asimd", "sve"} | _NATIVE_BF16
)
_BF16_CAPABILITY = (8, 0)

_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h
_LOWEST_PRIORITY = 19


class DtypeChoice(NamedTuple):
    """The dtype to compute in, and why where it is not simply what the checkpoint or the user says."""

    dtype: torch.dtype
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What `doctor` shows of a device. Memory in bytes; ``threads`` is 0 on CUDA.

    ``isa`` is what torch's own kernels are dispatched to (for instance AVX512, or the compute capability on
    CUDA); ``flags`` are the instruction sets that matter for inference, as the kernel reports them.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    isa: str
    flags: tuple[str, ...]
    native_bfloat16: bool
    cores: int
    threads: int
    memory_bytes: int
    free_bytes: int


def resolve_device(requested: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to use. Raises ConfigError when CUDA is asked for and torch sees none."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(
    requested: DtypeName, stored: str, facts: DeviceFacts, *, quantized: bool = False
) -> DtypeChoice:
    """The dtype to compute in, given what the user asked for and what the checkpoint is ``stored`` in.

    ``auto`` takes the checkpoint's, unless the device would only emulate it; ``quantized`` says that its linears are
    integers, which lose nothing by another dtype beside them. Raises ConfigError for a dtype asked for by name that
    the device cannot compute in.
    """
    wanted = stored if requested == "auto" else requested
    if wanted not in _DTYPES:
        return DtypeChoice(torch.float32, f"weights are stored in {wanted}; computed in float32")
    if facts.kind == "cpu" and wanted == "float16":
        if requested != "auto":
            raise ConfigError("--dtype float16: not computed on CPUs; use --dtype bfloat16 or float32")
        if quantized and facts.native_bfloat16:
            return DtypeChoice(
                torch.bfloat16,
                "float16 is not computed on CPUs; beside weights in few bits bfloat16 is quicker",
            )
        return DtypeChoice(
            torch.float32, "float16 is not computed on CPUs; float32 holds the same values exactly"
        )
    if wanted == "bfloat16" and not facts.native_bfloat16:
        if facts.kind == "cuda":
            if requested != "auto":
                raise ConfigError(
                    f"--dtype bfloat16: {facts.name} (sm {facts.isa}) needs sm 8.0; use float16"
                )
            return DtypeChoice(torch.float16, f"{facts.name} (sm {facts.isa}) has no bfloat16")
        if requested == "auto":
            return DtypeChoice(
                torch.float32, "this CPU has neither AVX512-BF16 nor AMX: bfloat16 is emulated"
            )
        return DtypeChoice(torch.bfloat16, "asked for, though this CPU only emulates it; float32 is faster")
    return DtypeChoice(_DTYPES[wanted])


def device_facts(device: torch.device, root: Path = Path("/")) -> DeviceFacts:
    """Look at ``device``; ``root`` is where the operating system's files are found."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        capability = (properties.major, properties.minor)
        return DeviceFacts(
            kind="cuda",
            name=properties.name,
            isa=f"{capability[0]}.{capability[1]}",
            flags=(),
            native_bfloat16=capability >= _BF16_CAPABILITY,
            cores=properties.multi_processor_count,
            threads=0,
            memory_bytes=total,
            free_bytes=free,
        )
    fields = _fields(root / "proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    memory = _fields(root / "proc/meminfo")
    total = _kibibytes(memory.get("MemTotal"))
    available = _kibibytes(memory.get("MemAvailable"))
    limit, used = _memory_limit(root)
    return DeviceFacts(
        kind="cpu",
        name=fields.get("model name") or "CPU",
        isa=torch.backends.cpu.get_cpu_capability(),
        flags=tuple(sorted(flags & _NOTED_FLAGS)),
        native_bfloat16=bool(flags & _NATIVE_BF16),
        cores=usable_cores(root),
        threads=torch.get_num_threads(),
        memory_bytes=min(total, limit) if limit else total,
        free_bytes=max(0, min(available, limit - used)) if limit else available,
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on: its affinity, and a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


@cache
def limit_threads() -> int:
    """Let torch use no more threads than there are usable cores; returns how many, the same in all of a process's life.

    In a container torch counts the host's cores; threads beyond the quota stop all the others at every
    barrier.
    """
    threads = min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(threads)
    return threads


def apart(function: Callable[[], ResultT]) -> ResultT:
    """What ``function`` returns, called on a thread that ends with it: for all computing beside a model's steps.

    OpenMP keeps a team of threads for every thread that ever computed in parallel. Where all teams together have more
    threads than the machine has cores, GNU's runtime no longer lets them spin at the barriers, hundreds in a step, but
    puts them to sleep: the steps of a small model then take half as long again. A team goes with its thread.
    """
    with ThreadPoolExecutor(1, "headrace-start") as thread:
        return thread.submit(function).result()


def alone(function: Callable[[], ResultT]) -> ResultT:
    """What ``function`` returns, in whose torch operations no other thread takes part: for little that is computed
    often beside a model's steps. It leaves no team either, and spares the thread that `apart` starts, which it falls
    back to where torch's libraries cannot be told.
    """
    limits = _thread_limits()
    if limits is None:
        return apart(function)
    threads = torch.get_num_threads()  # which also lets torch set this thread's number, if it has not yet
    limits.openmp(1)
    limits.mkl(1)
    try:
        return function()
    finally:
        limits.openmp(threads)
        limits.mkl(0)


class _ThreadLimits(NamedTuple):
    """How many threads the calling thread may have for what it computes; 0 of MKL's: what the process has."""

    openmp: Callable[[int], object]
    mkl: Callable[[int], object]


@cache
def _thread_limits() -> _ThreadLimits | None:
    """Those of the libraries in this torch, which itself sets limits for the whole process only."""
    try:
        # Called with the interpreter's lock held: giving it back would cost more than the call.
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return _ThreadLimits(
            library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", lambda threads: None)
        )
    except (OSError, AttributeError):
        return None


def keep_freed_memory() -> bool:
    """Let the C library keep freed buffers of a step for the next one; returns whether it could be told so.

    By default glibc hands a buffer of some megabytes back to the system when it is freed, and the next step
    pays for fresh zeroed pages again: at 256 rows that was most of the time of sampling. Call it once, before
    the first step on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    told = [mallopt(name, _KEPT_BYTES) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(told)


def return_freed_memory() -> None:
    """Give the system back what is free in the C library's heaps; after loading, which frees much for good."""
    with suppress(OSError, AttributeError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)


def huge_memory(nbytes: int) -> torch.Tensor:
    """Zeros uint8 [nbytes], which the system clears when they are first touched, in huge pages where it has them.

    Python maps shared memory unless told otherwise, and that is none of huge pages.
    """
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(address: int, nbytes: int) -> bool:
    """Let the system clear what was never touched of memory of this process now; whether it could.

    What the memory holds stays, whoever writes to it meanwhile. Linux has it from 5.14 on.
    """
    advise = _madvise()
    if advise is None:
        return False
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + nbytes - begin
    failed: int = advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return not failed


@cache
def _madvise() -> Callable[..., int] | None:
    """The system's, looked up once: that holds the interpreter's lock, and `populate` runs beside steps."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None


def lower_priority() -> None:
    """Let this thread run only where no other wants to; priorities are those of threads on Linux alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def resident_bytes() -> int:
    """Memory that this process takes; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def allowed_cpus(root: Path = Path("/")) -> str:
    """The CPUs that this process may run on, as the kernel lists them ("0-3,8"); empty where it does not say."""
    return _fields(root / "proc/self/status").get("Cpus_allowed_list", "")


def allocator(root: Path = Path("/")) -> str:
    """The allocator that was loaded before the C library's, or an empty name."""
    maps = _text(root / "proc/self/maps")
    return next((name for name in _ALLOCATORS if f"lib{name}" in maps), "")


def _memory_limit(root: Path) -> tuple[int, int]:
    """A container's memory limit and what of it is in use and cannot be dropped; 0, 0 without a limit."""
    group = root / "sys/fs/cgroup"
    limit, used = _text(group / "memory.max"), _text(group / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return 0, 0
    droppable = 0
    for line in _text(group / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            droppable = int(line.split()[1])
    return int(limit), int(used) - droppable


def _fields(path: Path) -> dict[str, str]:
    """The ``name: value`` lines of a file, first of each name; empty where there is no such file."""
    fields: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _kibibytes(value: str | None) -> int:
    return int(value.split()[0]) * 1024 if value else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
