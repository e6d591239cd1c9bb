"""The machine: device, dtype, threads, free memory, and the settings of the process that depend on them.

`memory_plan` sizes models.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeVar

import torch

from headrace.config import ConfigError

# The limits of CPU and memory that Linux's control groups set for this process, in versions 1 and 2 and both together.
#
#  /proc/self/cgroup      the path of the process's group in each hierarchy     0::/system.slice/headrace.service
#  /proc/self/mountinfo   where a hierarchy, or a part of it, is mounted        /  at  /sys/fs/cgroup
# A group is limited by its own files and by those of all groups above it, so all are read from the process's group up
# to the mount. What lies above the mount, in another namespace, cannot be seen.

_UNLIMITED = 1 << 60
"""Version 1 reports no limit as the largest number of whole pages below 2⁶³."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


class GroupLimits(NamedTuple):
    """The lowest limits of all groups; None: no limit.

    ``cores`` may be a fraction. ``free_bytes`` is the least that any limit leaves beside memory that is used already
    and cannot be reclaimed.
    """

    cores: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


class _Mount(NamedTuple):
    """``controllers`` of version 1, None for version 2; the group ``root`` of the hierarchy is seen at ``point``."""

    controllers: frozenset[str] | None
    root: PurePosixPath
    point: Path


def group_limits(root: Path = Path("/")) -> GroupLimits:
    """The limits of this process; ``root`` is the directory of the operating system's files."""
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for version, controller, groups in _hierarchies(root):
        for level, group in enumerate(groups):
            if "cpu" in controller:
                cores += _cores_of_1(group) if version == 1 else _cores_of_2(group)
            if "memory" in controller:
                memory += _memory_of_1(group, level > 0) if version == 1 else _memory_of_2(group)
    return GroupLimits(
        min(cores, default=None),
        min((limit for limit, _ in memory), default=None),
        min((max(0, limit - used) for limit, used in memory), default=None),
    )


def _hierarchies(root: Path) -> Iterator[tuple[int, frozenset[str], list[Path]]]:
    """Version, controllers and groups (the process's own first) of each hierarchy with one of the two controllers."""
    mounts = _mounts(root)
    for line in _file_text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = frozenset(names.split(","))
        if number == "0" and not names:
            yield (
                2,
                frozenset({"cpu", "memory"}),
                _groups(path, [each for each in mounts if not each.controllers]),
            )
        elif wanted := controllers & {"cpu", "memory"}:
            fitting = [each for each in mounts if each.controllers and wanted <= each.controllers]
            yield 1, wanted, _groups(path, fitting)


def _mounts(root: Path) -> list[_Mount]:
    """All mounted hierarchies; without a list of mounts, that of version 2 at its usual place."""
    found = []
    lines = _file_text(root / "proc/self/mountinfo").splitlines()
    for line in lines:
        fields, _, source = line.partition(" - ")
        kind, *rest = source.split(" ")
        if kind not in ("cgroup", "cgroup2") or len(fields.split(" ")) < 5:
            continue
        top, point = (_ESCAPED.sub(lambda m: chr(int(m[1], 8)), each) for each in fields.split(" ")[3:5])
        controllers = frozenset(rest[-1].split(",")) if kind == "cgroup" else None
        found.append(_Mount(controllers, PurePosixPath(top), root / point.lstrip("/")))
    return found or ([] if lines else [_Mount(None, PurePosixPath("/"), root / "sys/fs/cgroup")])


def _groups(path: str, mounts: list[_Mount]) -> list[Path]:
    """The folders of the group ``path`` and of those above it, as far as one of the mounts shows them.

    A path that no mount shows belongs to another namespace (docker with the host's, or ``/../..``). What is mounted is
    then the process's own group or one above it.
    """
    group = PurePosixPath(path.removesuffix(" (deleted)"))
    for mount in sorted(mounts, key=lambda each: len(each.root.parts)):
        if ".." not in group.parts and group.is_relative_to(mount.root):
            inside = group.relative_to(mount.root)
            folders = [mount.point / inside, *(mount.point / each for each in inside.parents)]
            return [each for each in dict.fromkeys(folders) if each.is_dir()]
    return [mounts[0].point] if mounts else []


def _cores_of_2(group: Path) -> list[float]:
    return _ratio(*_file_text(group / "cpu.max").split()[:2])


def _cores_of_1(group: Path) -> list[float]:
    return _ratio(_file_text(group / "cpu.cfs_quota_us"), _file_text(group / "cpu.cfs_period_us"))


def _ratio(quota: str = "", period: str = "") -> list[float]:
    limited = quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0
    return [int(quota) / int(period)] if limited else []


def _memory_of_2(group: Path) -> list[tuple[int, int]]:
    """Limit and use; above ``memory.high`` the kernel slows the group down, so that is a limit too."""
    limits = [
        int(text) for name in ("max", "high") if (text := _file_text(group / f"memory.{name}")).isdigit()
    ]
    used = _file_text(group / "memory.current")
    if not limits:
        return []
    droppable = _statistics(group).get("inactive_file", 0)
    return [(min(limits), max(0, int(used) - droppable) if used.isdigit() else 0)]


def _memory_of_1(group: Path, above: bool) -> list[tuple[int, int]]:
    """Limit and use; a group ``above`` the process's own counts it only if it is hierarchical."""
    if above and _file_text(group / "memory.use_hierarchy") == "0":
        return []
    statistics = _statistics(group)
    own, used = _file_text(group / "memory.limit_in_bytes"), _file_text(group / "memory.usage_in_bytes")
    limits = [statistics.get("hierarchical_memory_limit", _UNLIMITED), *([int(own)] if own.isdigit() else [])]
    if min(limits) >= _UNLIMITED:
        return []
    droppable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return [(min(limits), max(0, int(used) - droppable) if used.isdigit() else 0)]


def _statistics(group: Path) -> dict[str, int]:
    pairs = (line.split() for line in _file_text(group / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _file_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


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
_KEPT_BYTES = 256 << 20  # see docs/decisions/memory.md#buffers-of-a-step
_OWN_PAGES_BYTES = 128 << 10  # glibc's first threshold, which it raises with each buffer that is freed
_MADV_DONTNEED = 4  # asm-generic/mman-common.h
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h
_LOWEST_PRIORITY = 19


class DtypeChoice(NamedTuple):
    """The dtype to compute in, and a reason if it is not simply that of the checkpoint or the option."""

    dtype: torch.dtype
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts about a device that `doctor` shows. Memory in bytes; ``threads`` is 0 on CUDA.

    ``isa`` is the instruction set of torch's own kernels (for instance AVX512, or the compute capability on CUDA).
    ``flags`` are the instruction sets that matter for inference, as the kernel reports them.
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
    """The device to use. Raises ConfigError if CUDA is requested and torch finds none."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(
    requested: DtypeName, stored: str, facts: DeviceFacts, *, quantized: bool = False
) -> DtypeChoice:
    """The dtype to compute in, from the option and the dtype in which the checkpoint is ``stored``.

    ``auto`` uses the checkpoint's dtype, unless the device would only emulate it. ``quantized``: the linear weights are
    integers, so another dtype of the activations loses nothing. Raises ConfigError for an explicitly requested dtype
    that the device does not support.
    """
    wanted = stored if requested == "auto" else requested
    if wanted not in _DTYPES:
        return DtypeChoice(torch.float32, f"weights are stored in {wanted} and computed in float32")
    if facts.kind == "cpu" and wanted == "float16":
        if requested != "auto":
            raise ConfigError("--dtype float16: not supported on CPUs; use --dtype bfloat16 or float32")
        if quantized and facts.native_bfloat16:
            return DtypeChoice(
                torch.bfloat16,
                "float16 is not supported on CPUs; bfloat16 is used with quantized weights",
            )
        return DtypeChoice(
            torch.float32, "float16 is not supported on CPUs; float32 holds the same values exactly"
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
                torch.float32, "this CPU has neither AVX512-BF16 nor AMX, so products are computed in float32"
            )
        return DtypeChoice(torch.bfloat16, "bfloat16 is emulated on this CPU; --dtype float32 is faster")
    return DtypeChoice(_DTYPES[wanted])


def device_facts(device: torch.device, root: Path = Path("/")) -> DeviceFacts:
    """The facts about ``device``; ``root`` is the directory of the operating system's files."""
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
    limits = group_limits(root)
    return DeviceFacts(
        kind="cpu",
        name=fields.get("model name") or "CPU",
        isa=torch.backends.cpu.get_cpu_capability(),
        flags=tuple(sorted(flags & _NOTED_FLAGS)),
        native_bfloat16=bool(flags & _NATIVE_BF16),
        cores=usable_cores(root),
        threads=torch.get_num_threads(),
        memory_bytes=total if limits.memory_bytes is None else min(total, limits.memory_bytes),
        free_bytes=available if limits.free_bytes is None else min(available, limits.free_bytes),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use: its affinity, or the quota of its control groups if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group_limits(root).cores
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


@cache
def limit_threads() -> int:
    """Limit torch to the usable cores, for the whole process; returns the number of threads.

    In a container, torch counts the host's cores, and threads beyond the quota delay all others at every barrier.
    """
    threads = min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(threads)
    return threads


def apart(function: Callable[[], ResultT]) -> ResultT:
    """Call ``function`` on a temporary thread: for all computing outside a model's steps.

    OpenMP keeps a team of threads for every thread that ever computed in parallel. If all teams together have more
    threads than the machine has cores, GNU's runtime puts them to sleep at barriers instead of spinning. With hundreds
    of barriers per step, the steps of a small model then take 50 % longer. A team ends with its thread.
    """
    with ThreadPoolExecutor(1, "headrace-start") as thread:
        return thread.submit(function).result()


def alone(function: Callable[[], ResultT]) -> ResultT:
    """Call ``function`` with single-threaded torch operations: for frequent small work concurrent with a model's steps.

    Like `apart` it creates no thread team, but without starting a thread. It falls back to `apart` if torch's libraries
    cannot be configured.
    """
    limits = _thread_limits()
    if limits is None:
        return apart(function)
    threads = torch.get_num_threads()  # also makes torch set the number of this thread, if it has not yet
    limits.openmp(1)
    limits.mkl(1)
    try:
        return function()
    finally:
        limits.openmp(threads)
        limits.mkl(0)


def idle_team() -> ThreadPoolExecutor:
    """A thread with a team of OpenMP's threads that do nothing, until ``shutdown``: for steps beside busy threads.

    GNU's runtime spins at barriers while all teams together have at most as many threads as the machine has cores. A
    thread that plans the next step, or that tokenizes, then takes the core of a thread of the step, and the others spin
    until it is back: with eight calling threads on two cores, a step took five times as long. With this team there are
    more threads than cores, so the runtime lets them sleep. See `apart` for the opposite case.
    """
    thread = ThreadPoolExecutor(1, "headrace-idle-team")
    thread.submit(lambda: torch.ones(1 << 20).exp()).result()  # large enough to be computed in parallel
    return thread


class _ThreadLimits(NamedTuple):
    """Setters for the number of threads that the calling thread may use; 0 for MKL: the process default."""

    openmp: Callable[[int], object]
    mkl: Callable[[int], object]


@cache
def _thread_limits() -> _ThreadLimits | None:
    """The setters of the libraries in this torch, whose own setters apply to the whole process."""
    try:
        # Called with the interpreter's lock held: releasing it would cost more than the call.
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return _ThreadLimits(
            library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", lambda threads: None)
        )
    except (OSError, AttributeError):
        return None


def keep_freed_memory() -> bool:
    """Make the C library reuse freed buffers; returns whether that worked.

    By default glibc returns freed buffers of some megabytes to the system, and the next step has to fault in zeroed
    pages: at 256 rows that was most of the sampling time. Call it once, before the first step on a CPU.
    """
    return _set_thresholds(_KEPT_BYTES)


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """A context in which a model is loaded: freed buffers go back to the system at once, and are not reused.

    Prepared weights lie in other memory than those they are made of. Buffers that the C library keeps would be held
    beside them, and a model would take up to twice its memory while it is loaded. See
    docs/decisions/memory.md#freed-weights-while-loading.
    """
    _set_thresholds(_OWN_PAGES_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()
        return_freed_memory()


def _set_thresholds(nbytes: int) -> bool:
    """Buffers of so many bytes get pages of their own, which are returned when they are freed."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    accepted = [mallopt(name, nbytes) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(accepted)


def return_freed_memory() -> None:
    """Return free memory of the C library's heaps to the system."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def huge_memory(nbytes: int) -> torch.Tensor:
    """Zeros uint8 [nbytes], in huge pages if available; the system clears them on first use.

    Python maps shared memory by default, which never uses huge pages.
    """
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(address: int, nbytes: int) -> bool:
    """Fault in the untouched memory of an address range now; returns whether the system supports it (Linux 5.14).

    The content of the memory is preserved, even if other threads write to it concurrently.
    """
    advise = _madvise()
    if advise is None:
        return False
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + nbytes - begin
    failed: int = advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return not failed


def clear_memory(memory: torch.Tensor) -> None:
    """Make all of a tensor of `huge_memory` zeros again, and give its pages back to the system if that is possible."""
    advise = _madvise()
    place = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    if advise is None or advise(*place, _MADV_DONTNEED):
        memory.zero_()


def discard(tensor: torch.Tensor) -> None:
    """Give the whole pages of a contiguous tensor back to the system, whose elements are undefined from now on."""
    advise, begin = _madvise(), -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if advise is not None and tensor.is_cpu and length > 0:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_DONTNEED)


@cache
def _madvise() -> Callable[..., int] | None:
    """The C function, cached because the lookup holds the interpreter lock while steps run."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None


def lower_priority() -> None:
    """Let this thread run only on idle cores; only Linux has priorities per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def resident_bytes() -> int:
    """Memory used by this process; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def allowed_cpus(root: Path = Path("/")) -> str:
    """The CPUs that this process may use, as the kernel lists them ("0-3,8"); empty if it does not report them."""
    return _fields(root / "proc/self/status").get("Cpus_allowed_list", "")


def allocator(root: Path = Path("/")) -> str:
    """The name of the allocator loaded before the C library's, or an empty name."""
    maps = _text(root / "proc/self/maps")
    return next((name for name in _ALLOCATORS if f"lib{name}" in maps), "")


def _fields(path: Path) -> dict[str, str]:
    """The ``name: value`` lines of a file, first of each name; empty if the file does not exist."""
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


# Returns memory that steps have freed to the system, when a process has more than its memory plan says.
#
# The C library keeps freed buffers for the next step (`device.keep_freed_memory`). Those of one size serve
# few of another, so free memory grows beyond what any step needs where steps have buffers of many sizes, as
# those of hybrid models and of mixtures of experts have. See
# docs/decisions/memory.md#memory-that-steps-have-freed.

LOOK_STEPS = 256
"""Steps between two looks at the memory of the process."""

GROWTH_BYTES = 32 << 20
"""Growth since memory was returned that is worth doing it again: the next steps fault in what they need."""


class FreedMemory:
    """Watches a process that should have ``planned`` bytes."""

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._steps = 0
        self._left = 0

    def step(self) -> None:
        """Count a step; now and then, return what is free if there is more memory than planned."""
        self._steps += 1
        if self._steps % LOOK_STEPS or resident_bytes() <= max(self._planned, self._left + GROWTH_BYTES):
            return
        return_freed_memory()
        self._left = resident_bytes()
