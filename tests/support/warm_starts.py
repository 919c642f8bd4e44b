"""Starts workers of tests as forks of a process that has imported torch and transformers, which is most of a worker's start.

`install()` replaces `subprocess.Popen` in its process by one that does so for `python -m quire serve worker ...` on Linux; all
other commands, and workers with an environment that libraries read when they are imported, start as ever. A fork is a child of
the process that asked for it (`CLONE_PARENT`), with pipes, environment, working directory, process group and exit status of its
own, and runs the command by `runpy`. What Quire's own modules do when they are imported happens in the fork.
"""

import atexit
import ctypes
import importlib
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What else is on a fork's path is put there in the fork, with what Python does for such a folder when it starts.
_PATHS = (ROOT, ROOT / "kernels")
_COMMAND = (sys.executable, "-m", "quire", "serve", "worker")
_PRELOADED = (
    "torch",
    "transformers.conversion_mapping",
    "transformers.modeling_utils",
    "transformers.integrations.flash_attention",
)
# Read when a service asks for them, not when a library is imported.
_OWN_VARIABLES = ("QUIRE_", "OTEL_", "GRPC_", "PYTHONPATH", "PYTEST_")
_CLONE_PARENT = 0x8000
_CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220}
_PLAIN_OPTIONS = {"preexec_fn": None, "pass_fds": (), "shell": False, "start_new_session": False, "umask": -1}
_MAX_REQUEST_BYTES = 1 << 20

_plain = subprocess.Popen


class _Nursery:
    """The process that is forked, begun at its first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environ = dict(os.environ)
        settings = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, _PATHS))}
        with theirs:
            self._process = _plain(
                [sys.executable, "-m", "tests.support.warm_starts", str(theirs.fileno())],
                env=self.environ | settings,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Process id of a fork that runs the request; 0 = none could be had."""
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                return int(self._socket.recv(64) or b"0")
        except OSError:
            return 0


@cache
def _nursery() -> _Nursery:
    return _Nursery()


class Popen(_plain):  # type: ignore[type-arg, valid-type, misc]
    """`subprocess.Popen`; workers are forks."""

    def _execute_child(self, *given: Any) -> None:
        names = [*inspect.signature(_plain._execute_child).parameters][1:]  # type: ignore[attr-defined]
        asked = dict(zip(names, given, strict=True))
        pid = self._forked(asked) if _is_warm(asked) else 0
        if not pid:
            super()._execute_child(*given)
            return
        self.pid, self._child_created = pid, True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))

    @staticmethod
    def _forked(asked: dict[str, Any]) -> int:
        nursery = _nursery()
        environ = dict(os.environ if asked["env"] is None else asked["env"])
        differing = {name for name, value in (environ.items() ^ nursery.environ.items())}
        if not all(name.startswith(_OWN_VARIABLES) for name in differing):
            return 0
        request = {
            "arguments": list(map(str, asked["args"][2:])),
            "environ": environ,
            "folder": os.fspath(asked["cwd"] or os.getcwd()),
            "own_group": asked.get("process_group") == 0,
        }
        ends = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
        return nursery.fork(request, [inherited if asked[name] == -1 else asked[name] for name, inherited in ends])


def _is_warm(asked: dict[str, Any]) -> bool:
    args = asked["args"]
    fits = not isinstance(args, (str, bytes, os.PathLike)) and tuple(args[: len(_COMMAND)]) == _COMMAND
    plain = all(asked.get(name, value) == value for name, value in _PLAIN_OPTIONS.items())
    return fits and plain and asked.get("process_group", -1) in (-1, 0) and asked["executable"] is None


def install() -> None:
    """Let `subprocess.Popen` of this process start workers as forks, where that is known to work."""
    if sys.platform == "linux" and platform.machine() in _CLONE_NUMBERS:
        subprocess.Popen = Popen  # type: ignore[misc]


def is_installed() -> bool:
    """Whether it does so now."""
    return subprocess.Popen is Popen


def _fork_beside() -> int:
    """A fork whose parent is this process's parent. 0 in the fork. This process has no other thread."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(python.syscall(_CLONE_NUMBERS[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return pid


def _serve(own: socket.socket) -> dict[str, Any] | None:
    """Forks until the other side is gone (None); in a fork: what it is to run."""
    while True:
        try:
            text, descriptors, _, _ = socket.recv_fds(own, _MAX_REQUEST_BYTES, 3)
        except ConnectionError:
            return None
        if not text:
            return None
        pid = _fork_beside()
        if not pid:
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
        for descriptor in descriptors:
            os.close(descriptor)
        if not pid:
            own.close()
            return dict(json.loads(text))
        own.send(b"%d" % max(pid, 0))


def _become(request: dict[str, Any]) -> None:
    """What a new interpreter would have made of that environment."""
    if request["own_group"]:
        os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["arguments"]
    sys.orig_argv = [*_COMMAND[:2], *sys.argv]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = paths
    if any((Path(path) / "sitecustomize.py").exists() for path in paths):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """The process that is forked."""
    importlib.import_module("worker_svc.openmp")
    for name in _PRELOADED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a library started a thread when it was imported: nothing can be forked")
    with socket.socket(fileno=int(sys.argv[1])) as own:
        request = _serve(own)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main()
