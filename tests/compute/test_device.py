""""""

from __future__ import annotations

from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest
import torch

from headrace.compute.device import (
    DeviceFacts,
    GroupLimits,
    allocator,
    allowed_cpus,
    apart,
    device_facts,
    group_limits,
    keep_freed_memory,
    limit_threads,
    resident_bytes,
    resolve_device,
    resolve_dtype,
    return_freed_memory,
    usable_cores,
)
from headrace.config import ConfigError
from tests.doubles.forks import run_forked

OLD_CPU = DeviceFacts("cpu", "old", "AVX2", ("avx2",), False, 2, 2, 1, 1)
NEW_CPU = replace(OLD_CPU, flags=("avx512_bf16",), native_bfloat16=True)
T4 = DeviceFacts("cuda", "T4", "7.5", (), False, 40, 0, 1, 1)
H200 = DeviceFacts("cuda", "H200", "9.0", (), True, 132, 0, 1, 1)


@pytest.mark.parametrize(
    ("requested", "stored", "facts", "dtype", "explained"),
    [
        ("auto", "bfloat16", NEW_CPU, torch.bfloat16, False),
        ("auto", "bfloat16", OLD_CPU, torch.float32, True),
        ("auto", "float32", OLD_CPU, torch.float32, False),
        ("auto", "float16", NEW_CPU, torch.float32, True),
        ("auto", "float64", NEW_CPU, torch.float32, True),
        ("auto", "float16", T4, torch.float16, False),
        ("auto", "bfloat16", T4, torch.float16, True),
        ("auto", "bfloat16", H200, torch.bfloat16, False),
        ("bfloat16", "float32", OLD_CPU, torch.bfloat16, True),
        ("float32", "bfloat16", NEW_CPU, torch.float32, False),
        ("float16", "bfloat16", H200, torch.float16, False),
    ],
)
def test_dtype(requested: str, stored: str, facts: DeviceFacts, dtype: torch.dtype, explained: bool) -> None:
    choice = resolve_dtype(requested, stored, facts)  # type: ignore[arg-type]
    assert choice.dtype == dtype
    assert bool(choice.reason) == explained


@pytest.mark.parametrize(("facts", "dtype"), [(NEW_CPU, torch.bfloat16), (OLD_CPU, torch.float32)])
def test_half_precision_beside_integers_is_computed_in_what_a_cpu_has(
    facts: DeviceFacts, dtype: torch.dtype
) -> None:
    choice = resolve_dtype("auto", "float16", facts, quantized=True)
    assert choice.dtype == dtype
    assert "float16 is not supported on CPUs" in choice.reason
    assert resolve_dtype("auto", "float32", facts, quantized=True).dtype == torch.float32


@pytest.mark.parametrize(("requested", "facts"), [("float16", NEW_CPU), ("bfloat16", T4)])
def test_dtype_asked_for_by_name_and_impossible(requested: str, facts: DeviceFacts) -> None:
    with pytest.raises(ConfigError, match=f"--dtype {requested}"):
        resolve_dtype(requested, "float32", facts)  # type: ignore[arg-type]


def test_what_the_process_was_started_with(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    assert (allocator(tmp_path), allowed_cpus(tmp_path)) == ("", "")
    (folder / "status").write_text("Name:\tpython\nCpus_allowed:\tf0f\nCpus_allowed_list:\t0-3,8-11\n")
    (folder / "maps").write_text("7f00-7f01 r-xp 0 0:0 1 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2\n")
    assert (allocator(tmp_path), allowed_cpus(tmp_path)) == ("jemalloc", "0-3,8-11")


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="--device cuda"):
        resolve_device("cuda")


def system(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_facts(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__cpuinfo="processor : 0\nmodel name : Some CPU\nflags : fpu avx2 avx512_bf16 mce\n",
        proc__meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n",
    )
    facts = device_facts(torch.device("cpu"), root)
    assert (facts.name, facts.flags, facts.native_bfloat16) == ("Some CPU", ("avx2", "avx512_bf16"), True)
    assert (facts.memory_bytes, facts.free_bytes) == (1000 * 1024, 600 * 1024)


def test_a_containers_limits_count(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__meminfo="MemTotal: 1000 kB\nMemAvailable: 600 kB\n",
        sys__fs__cgroup__memory_dot_max="204800\n",
        sys__fs__cgroup__memory_dot_current="102400\n",
        sys__fs__cgroup__memory_dot_stat="anon 5\ninactive_file 51200\n",
        sys__fs__cgroup__cpu_dot_max="50000 100000\n",
    )
    facts = device_facts(torch.device("cpu"), root)
    assert (facts.memory_bytes, facts.free_bytes) == (204800, 204800 - 51200)
    assert usable_cores(root) == facts.cores == 1


def test_no_limits_and_no_files(tmp_path: Path) -> None:
    root = system(
        tmp_path, sys__fs__cgroup__cpu_dot_max="max 100000\n", sys__fs__cgroup__memory_dot_max="max\n"
    )
    facts = device_facts(torch.device("cpu"), root)
    assert facts.name == "CPU"
    assert facts.cores >= 1


def test_this_machine() -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts.cores >= 1
    assert 1 <= limit_threads() <= max(facts.cores, 1)
    assert isinstance(keep_freed_memory(), bool)


def test_what_is_computed_apart_leaves_no_team_of_threads() -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("the operating system does not list a process's threads")
    program = """
import os, time, torch
from headrace.compute.device import apart
torch.set_num_threads(3)
numbers = torch.ones(1 << 10)
before = len(os.listdir("/proc/self/task"))
apart(lambda: numbers.repeat(1 << 12).exp())
patience = time.monotonic() + 60  # threads that have been told to end do so soon
while (after_apart := len(os.listdir("/proc/self/task"))) > before and time.monotonic() < patience:
    time.sleep(0.01)
numbers.repeat(1 << 12).exp()
print(before, after_apart, len(os.listdir("/proc/self/task")))
"""
    reported = run_forked("-c", program)
    assert reported.returncode == 0, reported.stderr
    before, after_apart, after_here = map(int, reported.stdout.split())
    assert (after_apart, after_here) == (before, before + 2)


@pytest.mark.parametrize("way", ["alone", "apart"])
def test_what_is_computed_alone_has_no_team_of_threads(way: str) -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("the operating system does not list a process's threads")
    program = f"""
import os, time, torch
from headrace.compute import device
if "{way}" == "apart":
    device._thread_limits = lambda: None
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
def compute():
    numbers, heads = torch.ones(600, 600).exp(), torch.ones(4, 12, 256, 32)
    numbers @ numbers
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
before = count()
device.alone(compute)
patience = time.monotonic() + 60
while (after := count()) > before and time.monotonic() < patience:
    time.sleep(0.01)
compute()
print(before, after, count(), torch.get_num_threads())
"""
    reported = run_forked("-c", program)
    assert reported.returncode == 0, reported.stderr
    before, after, with_team, threads = map(int, reported.stdout.split())
    assert (after, with_team, threads) == (before, before + 2, 3)


def test_a_runner_beside_other_threads_lets_barriers_sleep() -> None:
    """Two teams have more threads than the cores that torch computes on, so OpenMP does not spin."""
    if not Path("/proc/self/task").exists():
        pytest.skip("the operating system does not list a process's threads")
    program = """
import os, time, torch
from tests.compute.test_runner import make
torch.set_num_threads(3)
torch.ones(1 << 20).exp()
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
runner = make(background=True)[0]
with_team = count()
runner.close()
patience = time.monotonic() + 60
while (after := count()) > before and time.monotonic() < patience:
    time.sleep(0.01)
print(before, with_team, after)
"""
    reported = run_forked("-c", program)
    assert reported.returncode == 0, reported.stderr
    before, with_team, after = map(int, reported.stdout.split())
    assert (with_team, after) == (before + 3, before)


def test_what_fails_apart_fails_here() -> None:
    def fail() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        apart(fail)


def test_a_process_knows_what_memory_it_takes_where_linux_says_so() -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the operating system does not say")
    page, taken = b"1" * (1 << 20), 0
    for _ in range(8):  # the system may take pages of libraries away meanwhile
        return_freed_memory()
        before = resident_bytes()
        with mmap(-1, 64 << 20) as held:
            for _ in range(64):
                held.write(page)
            taken = resident_bytes() - before
        if 48 << 20 < taken < 80 << 20:
            break
    assert 48 << 20 < taken < 80 << 20


def test_freed_buffers_return_to_the_system_while_a_model_loads() -> None:
    """Buffers freed in the middle of others; in a process of its own, since thresholds are the process's."""
    program = """
import ctypes
from headrace.compute.device import freeing_at_once, keep_freed_memory, resident_bytes
lib = ctypes.CDLL(None)
lib.malloc.restype, lib.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if not keep_freed_memory():
    raise SystemExit
def left():
    before = resident_bytes()
    buffers = [lib.malloc(1 << 20) for _ in range(64)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, 1 << 20)
    for buffer in buffers[:-1]:
        lib.free(buffer)
    return resident_bytes() - before
with freeing_at_once():
    print(left())
print(left())
"""
    done = run_forked("-c", program)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("the C library has no such thresholds")
    loading, after = map(int, done.stdout.split())
    assert loading < 8 << 20
    assert after > 48 << 20  # buffers of a step are reused


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "33 32 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "34 32 0:31 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory"
NO_LIMIT = "9223372036854771712"
NONE = GroupLimits()


def tree(root: Path, cgroup: str, mounts: str, **files: dict[str, str]) -> Path:
    """``cgroup`` and ``mounts`` are the files of /proc; ``files`` are those of each folder below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    (root / "proc/self/mountinfo").write_text(f"23 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}\n")
    for folder, texts in files.items():
        path = root / "sys/fs/cgroup" / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (path / name).write_text(text + "\n")
    return root


def memory(limit: str, used: str = "0", **more: str) -> dict[str, str]:
    return {"memory.max": limit, "memory.current": used} | {
        f"memory.{name}": text for name, text in more.items()
    }


def test_a_service_of_systemd_in_a_slice(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/system.slice/headrace.service",
        V2,
        **{
            "": {},
            "system.slice": {"cpu.max": "150000 100000", **memory("max", "700")},
            "system.slice/headrace.service": {
                "cpu.max": "400000 100000",
                **memory("1000", "400", stat="anon 1\ninactive_file 100"),
            },
        },
    )
    assert group_limits(root) == GroupLimits(1.5, 1000, 700)


def test_the_slice_above_a_service_has_less_memory_left(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/a.slice/b.slice/c.service",
        V2,
        **{
            "a.slice": memory("5000", "4900"),
            "a.slice/b.slice": memory("max", "4000"),
            "a.slice/b.slice/c.service": memory("1000", "400"),
        },
    )
    assert group_limits(root) == GroupLimits(None, 1000, 100)


@pytest.mark.parametrize(("high", "limit"), [("600", 600), ("max", 1000), ("2000", 1000)])
def test_memory_high_is_a_limit_too(tmp_path: Path, high: str, limit: int) -> None:
    root = tree(tmp_path, "0::/x", V2, x=memory("1000", "100", high=high))
    assert group_limits(root) == GroupLimits(None, limit, limit - 100)


@pytest.mark.parametrize(
    ("cgroup", "mount"),
    [
        ("0::/", V2),  # a private namespace
        ("0::/docker/abc", V2.replace(" / /sys", " /docker/abc /sys")),  # the host's, its own part mounted
        ("0::/docker/abc", V2.replace(" / /sys", " /../../docker/abc /sys")),
        ("0::/../other", V2),  # moved out of its namespace
        ("0::/kubepods/pod1/abc", V2.replace(" / /sys", " /kubepods/pod2 /sys")),
        ("0::/gone (deleted)", V2),
        ("0::/not/there", V2),
    ],
)
def test_containers_see_their_group_at_the_mount(tmp_path: Path, cgroup: str, mount: str) -> None:
    root = tree(tmp_path, cgroup, mount, **{"": {"cpu.max": "200000 100000", **memory("1000", "1")}})
    assert group_limits(root) == GroupLimits(2.0, 1000, 999)


def test_docker_with_the_hosts_namespace_and_all_of_it_mounted(tmp_path: Path) -> None:
    scope = "system.slice/docker-abc.scope"
    root = tree(tmp_path, f"0::/{scope}", V2, **{scope: {"cpu.max": "50000 100000", **memory("1000")}})
    assert group_limits(root) == GroupLimits(0.5, 1000, 1000)
    assert usable_cores(root) == 1


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
        f"{V1_CPU}\n{V1_MEMORY}",
        **{
            "cpu,cpuacct/docker": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
            "cpu,cpuacct/docker/abc": {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"},
            "memory": {"memory.limit_in_bytes": NO_LIMIT, "memory.use_hierarchy": "1"},
            "memory/docker/abc": {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "500",
                "memory.stat": f"inactive_file 7\nhierarchical_memory_limit {NO_LIMIT}\ntotal_inactive_file 200",
            },
        },
    )
    assert group_limits(root) == GroupLimits(2.5, 1000, 700)


@pytest.mark.parametrize(("hierarchical", "limit"), [("1", 800), ("0", 1000)])
def test_a_group_of_version_1_counts_those_below_it_if_it_is_hierarchical(
    tmp_path: Path, hierarchical: str, limit: int
) -> None:
    root = tree(
        tmp_path,
        "5:memory:/a/b",
        V1_MEMORY,
        **{
            "memory/a": {
                "memory.limit_in_bytes": "800",
                "memory.usage_in_bytes": "0",
                "memory.use_hierarchy": hierarchical,
            },
            "memory/a/b": {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "0"},
        },
    )
    assert group_limits(root).memory_bytes == limit


def test_a_limit_of_version_1_above_the_mount_is_in_the_statistics(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "5:memory:/docker/abc",
        V1_MEMORY.replace(" / /sys", " /docker/abc /sys"),
        memory={
            "memory.limit_in_bytes": NO_LIMIT,
            "memory.usage_in_bytes": "100",
            "memory.stat": "hierarchical_memory_limit 900",
        },
    )
    assert group_limits(root) == GroupLimits(None, 900, 800)


def test_both_versions_at_once(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "4:cpu,cpuacct:/x\n0::/x",
        f"{V1_CPU}\n{V2.replace('/sys/fs/cgroup', '/sys/fs/cgroup/unified')}",
        **{
            "cpu,cpuacct/x": {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"},
            "unified/x": {"memory.max": "1000", "memory.current": "0"},
        },
    )
    assert group_limits(root) == GroupLimits(3.0, 1000, 1000)


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "0::/", V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/a\040b"), **{"a b": memory("1000")}
    )
    assert group_limits(root).memory_bytes == 1000


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"cpu.max": "max 100000", "memory.max": "max", "memory.high": "max", "memory.current": "5"},
        {"cpu.max": "", "memory.max": ""},
        {"cpu.max": "0 100000"},
        {"cpu.max": "100000 0"},
        {"cpu.max": "nonsense", "memory.max": "-1", "memory.stat": "x\ny z\n"},
    ],
)
def test_no_limit(tmp_path: Path, texts: dict[str, str]) -> None:
    assert group_limits(tree(tmp_path, "0::/x", V2, x=texts)) == NONE


@pytest.mark.parametrize("limit", [NO_LIMIT, str(2**63 - 1), "-1"])
def test_no_limit_of_version_1(tmp_path: Path, limit: str) -> None:
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": "5"}
    assert group_limits(tree(tmp_path, "5:memory:/", V1_MEMORY, memory=files)) == NONE


@pytest.mark.parametrize(
    "line", ["", "nonsense", "0:", "::", "5:memory", "x - cgroup2", "1 2 3 4 - cgroup cgroup"]
)
def test_files_of_nonsense_set_no_limit(tmp_path: Path, line: str) -> None:
    assert group_limits(tree(tmp_path, line, line)) == NONE
    assert group_limits(tmp_path / "nowhere") == NONE


def test_the_device_has_what_the_groups_leave(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a/b", V2, a=memory("204800", "102400"), **{"a/b": memory("max", "51200")})
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    facts = device_facts(torch.device("cpu"), root)
    assert (facts.memory_bytes, facts.free_bytes) == (204800, 102400)
