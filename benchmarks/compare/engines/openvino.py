"""OpenVINO GenAI: its ContinuousBatchingPipeline in a child process.

Best settings: bfloat16 for computing and for keys and values, threads = the machine's cores, all sequences at
once, steps of as many tokens as vLLM's server has. Prefix caching is on, which is not its default; requests
that arrive together share no prefix.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.engines.base import Host
from benchmarks.compare.engines.environments import PeerEnvironment
from benchmarks.compare.engines.processes import Child

NAME = "openvino"
# The fastest of 256 (its default), 1,024 and 2,048 with many prompts, and no slower with one.
_MAX_BATCHED_TOKENS = 2_048


class OpenVINOProgram:
    """The pipeline, driven step by step."""

    name = NAME
    starts_slowly = False
    workloads: Sequence[str] = ()

    def __init__(self, host: Host) -> None:
        self._host, self._peer = host, PeerEnvironment(host.peers, NAME)

    def missing(self) -> str:
        """See Program."""
        return self._peer.missing()

    def settings(self) -> Mapping[str, Any]:
        """See Program."""
        scheduler = {
            "cache_size": self._host.kv_gib,
            "max_num_seqs": self._host.max_num_seqs,
            "max_num_batched_tokens": _MAX_BATCHED_TOKENS,
            "enable_prefix_caching": True,
        }
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": str(self._host.threads),
        }
        return {"scheduler": scheduler, "properties": properties}

    def prepare(self) -> Path:
        """The checkpoint in OpenVINO's format, converted by its own tools."""
        folder = self._host.checkpoint.with_name(f"{self._host.checkpoint.name}-openvino")
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.part")
            self._peer.call("benchmarks.compare.offline.to_openvino", [str(self._host.checkpoint), str(unfinished)])
            unfinished.rename(folder)
        return folder

    def spawn(self) -> Child:
        """See Program."""
        command = [str(self._peer.python), "-m", "benchmarks.compare.offline.with_openvino"]
        return Child(command, self._peer.environ(), self._host.logs / "openvino.log", answers=True)
