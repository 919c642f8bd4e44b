"""Processors and memory available to this container, by cgroup limits where there are any."""

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V1_MEMORY = _CGROUP / "memory"


def num_processors() -> int:
    """Processors that this process may keep busy: CPU affinity, limited by a cgroup quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _text(_CGROUP / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        allowed = min(allowed, math.ceil(int(words[0]) / int(words[1])))
    return max(1, allowed)


def num_compute_threads() -> int:
    """OMP_NUM_THREADS where it is set, as every program with OpenMP reads it; else `num_processors`."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdecimal() and int(given) else num_processors()


def free_memory_bytes() -> int:
    """Bytes that can still be allocated: the minimum of the machine's available memory and the cgroup's remainder."""
    free = [_meminfo("MemAvailable")]
    for limit, used, stat in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current", _CGROUP / "memory.stat"),
        (
            _CGROUP_V1_MEMORY / "memory.limit_in_bytes",
            _CGROUP_V1_MEMORY / "memory.usage_in_bytes",
            _CGROUP_V1_MEMORY / "memory.stat",
        ),
    ):
        most, now = _text(limit).strip(), _text(used).strip()
        if most.isdigit() and now.isdigit():
            # File pages count as used but are reclaimed under memory pressure.
            free.append(int(most) - int(now) + _stat(stat, "inactive_file"))
    return max(0, min(free))


def peak_bytes(work: Callable[[], object]) -> int:
    """Run `work` and return how far resident memory rose above its previous level, at its peak."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kib(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _meminfo(name: str) -> int:
    return _kib(_text(Path("/proc/meminfo")), name)


def _status(name: str) -> int:
    return _kib(_text(Path("/proc/self/status")), name)


def _stat(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return 0
