"""The limits of CPU and memory that Linux's control groups set for this process, in versions 1 and 2 and both together.

```
 /proc/self/cgroup      the path of the process's group in each hierarchy     0::/system.slice/headrace.service
 /proc/self/mountinfo   where a hierarchy, or a part of it, is mounted        /  at  /sys/fs/cgroup
```
A group is limited by its own files and by those of all groups above it, so all are read from the process's group up to
the mount. What lies above the mount, in another namespace, cannot be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
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
    lines = _text(root / "proc/self/mountinfo").splitlines()
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
    return _ratio(*_text(group / "cpu.max").split()[:2])


def _cores_of_1(group: Path) -> list[float]:
    return _ratio(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _ratio(quota: str = "", period: str = "") -> list[float]:
    limited = quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0
    return [int(quota) / int(period)] if limited else []


def _memory_of_2(group: Path) -> list[tuple[int, int]]:
    """Limit and use; above ``memory.high`` the kernel slows the group down, so that is a limit too."""
    limits = [int(text) for name in ("max", "high") if (text := _text(group / f"memory.{name}")).isdigit()]
    used = _text(group / "memory.current")
    if not limits:
        return []
    droppable = _statistics(group).get("inactive_file", 0)
    return [(min(limits), max(0, int(used) - droppable) if used.isdigit() else 0)]


def _memory_of_1(group: Path, above: bool) -> list[tuple[int, int]]:
    """Limit and use; a group ``above`` the process's own counts it only if it is hierarchical."""
    if above and _text(group / "memory.use_hierarchy") == "0":
        return []
    statistics = _statistics(group)
    own, used = _text(group / "memory.limit_in_bytes"), _text(group / "memory.usage_in_bytes")
    limits = [statistics.get("hierarchical_memory_limit", _UNLIMITED), *([int(own)] if own.isdigit() else [])]
    if min(limits) >= _UNLIMITED:
        return []
    droppable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return [(min(limits), max(0, int(used) - droppable) if used.isdigit() else 0)]


def _statistics(group: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(group / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
