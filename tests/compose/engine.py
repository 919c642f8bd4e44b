"""A Docker engine of our own: dockerd in a network namespace that nothing else is in, with images, sockets and state in one folder.

No rule, bridge or route of it touches the machine's network; when the namespace is deleted they are gone. What is left over by a
run that was killed is found by its name and removed when the next one starts.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.commands import ROOT, Failure, run
from tests.support.debian import Docker, program

NAME = f"quire-compose-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
FOLDER = Path("/var/tmp") / NAME
NAMESPACE = Path("/run/netns") / NAME
ADDRESS = "172.17.0.1"
"""Of the engine, as containers being built see it."""
MIRROR_PORT = 8900
_DATA_BYTES = 9 * 2**30
"""Bound for images and containers where they are kept in memory: there 5 GB of small files are written and removed in seconds."""
_ENOUGH_MEMORY = 14 * 2**30
_SETTINGS = {"features": {"containerd-snapshotter": True}}
"""containerd keeps the images: without it builds cannot be written as OCI archives."""
_START_S = 30.0
_STOP_S = 30.0


class Engine:
    """Context manager: the engine runs inside. `environ` is what a docker client needs to talk to it."""

    def __init__(self, docker: Docker) -> None:
        self._path = docker.path
        self.environ = {
            "DOCKER_HOST": f"unix://{FOLDER}/docker.sock",
            "DOCKER_CONFIG": str(docker.config),
            "DOCKER_BUILDKIT": "1",
            "BUILDKIT_PROGRESS": "plain",
            "COMPOSE_ANSI": "never",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        remove_leftovers()
        (FOLDER / "data").mkdir(parents=True)
        if _available_memory() > _ENOUGH_MEMORY:
            run("mount", "-t", "tmpfs", "-o", f"size={_DATA_BYTES},mode=0711", NAME, FOLDER / "data")
        run(program("ip"), "netns", "add", NAME)
        run(program("ip"), "-n", NAME, "link", "set", "lo", "up")
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        remove_leftovers()

    def _start(self) -> None:
        (FOLDER / "engine.json").write_text(json.dumps(_SETTINGS), encoding="utf-8")
        words = [
            *("dockerd", "--config-file", FOLDER / "engine.json", "--host", self.environ["DOCKER_HOST"]),
            *("--data-root", FOLDER / "data", "--exec-root", FOLDER / "exec", "--pidfile", FOLDER / "pid"),
            *("--storage-driver", "overlayfs", "--bip", f"{ADDRESS}/16", "--cgroup-parent", f"/{NAME}"),
            *("--containerd-namespace", NAME, "--containerd-plugins-namespace", f"{NAME}-plugins"),
        ]
        with (FOLDER / "log").open("wb") as log:
            # A session of its own: Ctrl-C ends the run, and the run ends the engine, in this order.
            command = [*inside(), *map(str, words)]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PATH": self._path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until_s = time.monotonic() + _START_S
        while not self.docker("info", check=False):
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise Failure(f"dockerd did not start:\n{(FOLDER / 'log').read_text(encoding='utf-8')[-3000:]}")
            time.sleep(0.1)

    def docker(self, *words: str | Path, check: bool = True, stdin: str | None = None) -> str:
        """Output of `docker ...`."""
        return run(program("docker"), *words, environ=self.environ, check=check, stdin=stdin)

    def image_bytes(self, image: str) -> int:
        """Size of an image, all layers."""
        found: list[dict[str, Any]] = json.loads(self.docker("image", "inspect", image))
        return int(found[0]["Size"])

    @contextmanager
    def serving(self, folder: Path) -> Iterator[None]:
        """`folder` over HTTP for containers being built, which reach nothing else: http://ADDRESS:MIRROR_PORT."""
        words = [*inside(), sys.executable, "-m", "http.server", str(MIRROR_PORT), "--bind", ADDRESS]
        with (FOLDER / "mirror.log").open("wb") as log:
            server = subprocess.Popen([*words, "--directory", str(folder)], stdout=log, stderr=log)
        try:
            yield
        finally:
            server.terminate()
            server.wait()


def inside() -> list[str]:
    """What to put before a command so that it runs in the engine's network: its 127.0.0.1 has the published doors."""
    return [program("nsenter"), f"--net={NAMESPACE}"]


def remove_leftovers() -> None:
    """Ends the engine if it runs, and removes everything that it had: containers, mounts, control groups, namespace, folder."""
    for pid in _pids_in_namespace():
        _end(pid, signal.SIGTERM)
    _wait_until_gone(_STOP_S)
    for pid in [*_pids_in_namespace(), *_pids_of_containers()]:
        _end(pid, signal.SIGKILL)
    _wait_until_gone(_STOP_S)
    for mount in sorted(_mounts(), key=len, reverse=True):
        run("umount", "--lazy", mount, check=False)
    if NAMESPACE.exists():
        run(program("ip"), "netns", "del", NAME)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for group in sorted(_control_groups(), key=lambda path: len(path.parts), reverse=True):
        group.rmdir()


def leftovers() -> list[str]:
    """What is there of an engine, in words; empty when nothing is."""
    found = [f"process {pid}" for pid in (*_pids_in_namespace(), *_pids_of_containers())]
    found += [f"mount {mount}" for mount in _mounts()]
    found += [f"control group {group}" for group in _control_groups()]
    return found + [str(path) for path in (NAMESPACE, FOLDER) if path.exists()]


def _wait_until_gone(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while (_pids_in_namespace() or _pids_of_containers()) and time.monotonic() < until_s:
        time.sleep(0.1)


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _end(pid: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sign)


def _pids_in_namespace() -> list[int]:
    """dockerd, containerd, their shims, and all else that runs in the namespace; containers are in namespaces of their own."""
    if not NAMESPACE.exists():
        return []
    wanted = NAMESPACE.stat().st_ino
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _inode(folder / "ns/net") == wanted]


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _pids_of_containers() -> list[int]:
    groups = [path / "cgroup.procs" for path in _control_groups()]
    return sorted({int(pid) for path in groups if path.exists() for pid in path.read_text(encoding="ascii").split()})


def _control_groups() -> list[Path]:
    roots = (*Path("/sys/fs/cgroup").glob(f"*/{NAME}"), *Path("/sys/fs/cgroup").glob(NAME))
    return [path for root in roots for path in (root, *root.rglob("*")) if path.is_dir()]


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = (line.split()[4] for line in lines)
    return [point for point in points if point.startswith(f"{FOLDER}/")]
