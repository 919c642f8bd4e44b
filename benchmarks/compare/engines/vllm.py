"""vLLM's CPU build: its OpenAI server, and its `LLM` in process.

Best settings on few cores: compute threads bound to all of them (by default it reserves one), bfloat16, room
for all requests, prefix caching, and tcmalloc and Intel's OpenMP preloaded, as its documentation recommends.
tcmalloc is the system's (Debian: libtcmalloc-minimal4); it is left out if there is none.
"""

import asyncio
import ctypes.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import sse
from benchmarks.compare.engines.base import Host
from benchmarks.compare.engines.environments import PeerEnvironment
from benchmarks.compare.engines.processes import Child, free_port
from benchmarks.compare.wires import OpenAIWire, Wire

NAME = "vllm"
_MODEL = "model"
# What `vllm serve` runs; that command itself looks for a package called vllm, but the CPU build has another
# name.
_SERVER = "vllm.entrypoints.openai.api_server"
_POLL_S = 0.1


def _environ(host: Host, peer: PeerEnvironment) -> dict[str, str]:
    bound = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{host.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(host.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    preloaded = [ctypes.util.find_library("tcmalloc_minimal"), peer.file("lib/libiomp5.so")]
    return {**bound, "LD_PRELOAD": ":".join(str(library) for library in preloaded if library)}


def _limits(host: Host) -> dict[str, Any]:
    return {"max_num_seqs": host.max_num_seqs, "max_model_len": host.max_model_len}


class VllmServer:
    """vLLM's OpenAI server."""

    name = NAME
    starts_slowly = True

    def __init__(self, host: Host) -> None:
        self._host, self._peer = host, PeerEnvironment(host.peers, NAME)
        self._port = 0

    def missing(self) -> str:
        """See Server."""
        return self._peer.missing()

    def settings(self) -> Mapping[str, Any]:
        """See Server."""
        return {"command": ["python", *self._arguments("MODEL")], "environment": self._shown_environment()}

    def _shown_environment(self) -> dict[str, str]:
        found = self._environ()
        return {**found, "LD_PRELOAD": ":".join(Path(part).name for part in found["LD_PRELOAD"].split(":"))}

    def _environ(self) -> dict[str, str]:
        return _environ(self._host, self._peer)

    def _arguments(self, model: str) -> list[str]:
        limits = [
            part for name, value in _limits(self._host).items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        named = ["--model", model, "--served-model-name", _MODEL, "--dtype", "bfloat16"]
        return ["-m", _SERVER, *named, *limits, "--enable-prefix-caching"]

    def versions(self) -> Mapping[str, str]:
        """See Server."""
        return installed_versions(self._peer, ("vllm-cpu", "torch", "transformers"))

    def prepare(self) -> None:
        """No-op."""

    def spawn(self) -> Child:
        """See Server."""
        self._port = free_port()
        listen = ["--host", "127.0.0.1", "--port", str(self._port), "--disable-uvicorn-access-log"]
        command = [str(self._peer.python), *self._arguments(str(self._host.checkpoint)), *listen]
        environ = self._peer.environ(**self._environ())
        return Child(command, environ, self._host.logs / "vllm.log", answers=False)

    async def ready(self, child: Child) -> None:
        """See Server."""
        await until_healthy(child, self._port)

    def wire(self) -> Wire:
        """See Server."""
        return OpenAIWire("127.0.0.1", self._port, _MODEL, {"return_token_ids": True})


class VllmProgram:
    """`LLM` in a child process."""

    name = "vllm-offline"
    starts_slowly = True
    workloads: Sequence[str] = ()

    def __init__(self, host: Host) -> None:
        self._host, self._peer = host, PeerEnvironment(host.peers, NAME)

    def missing(self) -> str:
        """See Program."""
        return self._peer.missing()

    def settings(self) -> Mapping[str, Any]:
        """See Program."""
        return {"dtype": "bfloat16", "enable_prefix_caching": True, **_limits(self._host)}

    def prepare(self) -> Path:
        """The checkpoint itself."""
        return self._host.checkpoint

    def spawn(self) -> Child:
        """See Program."""
        command = [str(self._peer.python), "-m", "benchmarks.compare.offline.with_vllm"]
        environ = self._peer.environ(**_environ(self._host, self._peer))
        return Child(command, environ, self._host.logs / "vllm-offline.log", answers=True)


async def until_healthy(child: Child, port: int) -> None:
    """Wait until `/health` returns 200. Raises RuntimeError if the process ends before."""
    while await sse.get_status("127.0.0.1", port, "/health") != 200:
        child.check()
        await asyncio.sleep(_POLL_S)


def installed_versions(peer: PeerEnvironment, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in the peer's environment, from the names of its metadata folders."""
    found = {}
    for name in packages:
        folder = peer.file(f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info")
        if folder is not None:
            found[name] = folder.name.removesuffix(".dist-info").partition("-")[2]
    return found
