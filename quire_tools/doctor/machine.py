"""Checks of the machine: processor, memory, disk, open files, ports, clock."""

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire.sizes import GIB, size_text
from quire_tools.doctor.findings import Finding, ok, problem, warning
from worker_svc import container

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_MIN_MEMORY, _MIN_DISK = 2 * GIB, GIB
_MIN_FILES, _GOOD_FILES = 1_024, 4_096
_BUILT = Path(__file__)


def processor() -> Iterator[Finding]:
    """Check the CPU's vector extensions and the number of usable processors."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        yield ok("processor", f"{container.num_processors()} usable")
        return
    flags = next((line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))), [])
    has = [flag for flag in _CPU_FLAGS if flag in flags]
    what = f"{container.num_processors()} usable; {', '.join(has) or 'no vector extensions that matter'}"
    if "x86" in os.uname().machine and "avx2" not in has:
        yield warning("processor", what, "without avx2 a CPU worker is very slow; use another machine or a GPU")
    else:
        yield ok("processor", what)


def memory() -> Iterator[Finding]:
    """Check free memory, by the machine and by the container's limit."""
    free = container.free_memory_bytes()
    if free < _MIN_MEMORY:
        yield warning(
            "memory",
            f"{size_text(free)} free",
            "`quire plan --model ...` says what fits; free some, or use a smaller model",
        )
    else:
        yield ok("memory", f"{size_text(free)} free")


def disk() -> Iterator[Finding]:
    """Check disk space for compiled kernels and downloaded models."""
    for name, folder in (("temporary folder", Path(tempfile.gettempdir())), ("home folder", Path.home())):
        place = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        free = shutil.disk_usage(place).free
        if free < _MIN_DISK:
            yield warning(
                f"disk, {name}", f"{size_text(free)} free in {folder}", "free some, or set TMPDIR or HF_HOME elsewhere"
            )
        else:
            yield ok(f"disk, {name}", f"{size_text(free)} free in {folder}")


def open_files() -> Iterator[Finding]:
    """Check the limit of open files; each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"{soft} at a time (at most {hard})"
    to_do = f"ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    if 0 <= soft < _MIN_FILES:
        yield problem("open files", what, to_do)
    elif 0 <= soft < _GOOD_FILES:
        yield warning("open files", f"{what}: too few for thousands of connections", to_do)
    else:
        yield ok("open files", what)


def ports(wanted: Mapping[str, int]) -> Iterator[Finding]:
    """Check the default ports of `quire up`, given by the option that changes each."""
    taken = [(option, port) for option, port in wanted.items() if not _is_free(port)]
    for option, port in taken:
        yield warning("ports", f"{port} is in use", f"`quire up` needs another one: {option} 0 takes any that is free")
    if not taken:
        yield ok("ports", f"{', '.join(str(port) for port in wanted.values())} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def clock() -> Iterator[Finding]:
    """Check the clock, on which certificates, traces and recordings depend."""
    now = time.time()
    if now < _BUILT.stat().st_mtime - 86_400:
        yield problem(
            "clock", f"{time.ctime(now)}: before this program was installed", "set the clock, or start a time service"
        )
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
