"""llama.cpp: its server with as many slots as sequences run, built for this processor (benchmarks.compare.install).

Best settings: both thread counts at the machine's cores, bfloat16 weights as GGUF, a separate cache per slot
(in a common one every sequence scans the tokens of all others; on the other hand no slot can use another's
prefix), no copies of prompts kept beside it. Keys and values stay float16, its default: with bfloat16,
prompts took longer. Weights of eight or four bits are made from that file by its own program.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare.engines.base import Host
from benchmarks.compare.engines.environments import PeerEnvironment
from benchmarks.compare.engines.processes import Child, free_port
from benchmarks.compare.engines.vllm import installed_versions, until_healthy
from benchmarks.compare.wires import LlamaCppWire, Wire

NAME = "llamacpp"
FORMS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}
"""Of rounded weights: part of the engine's name, and llama.cpp's own name."""


class LlamaCppServer:
    """`llama-server`. `form`: of its weights, one of FORMS; empty: bfloat16."""

    starts_slowly = False

    def __init__(self, host: Host, kv_token_bytes: int, form: str = "") -> None:
        self.name = f"{NAME}-{form}" if form else NAME
        self._form = form
        self._host, self._peer = host, PeerEnvironment(host.peers, NAME)
        self._num_positions = (host.kv_gib << 30) // kv_token_bytes
        self._port = 0

    def missing(self) -> str:
        """See Server."""
        return self._peer.missing()

    def settings(self) -> Mapping[str, Any]:
        """See Server."""
        return {"command": ["llama-server", *self._arguments(self._gguf(self._form).name)]}

    def _arguments(self, model: str) -> list[str]:
        threads = str(self._host.threads)
        return [
            *("--model", model, "--ctx-size", str(self._num_positions), "--no-kv-unified", "--cache-ram", "0"),
            *("--parallel", str(self._host.max_num_seqs), "--threads", threads, "--threads-batch", threads),
        ]

    def versions(self) -> Mapping[str, str]:
        """See Server."""
        built = self._peer.folder / "llama.cpp.version"
        return {
            **installed_versions(self._peer, ("gguf",)),
            "llama-cpp-python": built.read_text(encoding="utf-8").strip(),
        }

    def _gguf(self, form: str) -> Path:
        return self._host.checkpoint.with_name(f"{self._host.checkpoint.name}{form and f'-{form}'}.gguf")

    def prepare(self) -> None:
        """Convert the checkpoint to GGUF, and round its weights."""
        if not (exact := self._gguf("")).exists():
            unfinished = exact.with_suffix(".part")
            self._peer.call("benchmarks.compare.offline.to_gguf", [str(self._host.checkpoint), str(unfinished)])
            unfinished.rename(exact)
        if not (rounded := self._gguf(self._form)).exists():
            unfinished = rounded.with_suffix(".part")
            program = str(self._peer.folder / "bin" / "llama-quantize")
            self._peer.run([program, str(exact), str(unfinished), FORMS[self._form]])
            unfinished.rename(rounded)

    def spawn(self) -> Child:
        """See Server."""
        self._port = free_port()
        listen = ["--host", "127.0.0.1", "--port", str(self._port)]
        command = [
            str(self._peer.folder / "bin" / "llama-server"),
            *self._arguments(str(self._gguf(self._form))),
            *listen,
        ]
        return Child(command, self._peer.environ(), self._host.logs / f"{self.name}.log", answers=False)

    async def ready(self, child: Child) -> None:
        """See Server."""
        await until_healthy(child, self._port)

    def wire(self) -> Wire:
        """See Server."""
        return LlamaCppWire("127.0.0.1", self._port)
