"""Limits of control groups, from trees of files as containers, services and both versions have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.compute.device import GroupLimits, device_facts, group_limits, usable_cores

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
