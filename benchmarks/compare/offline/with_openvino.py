"""OpenVINO GenAI's ContinuousBatchingPipeline, step by step: python -m benchmarks.compare.offline.with_openvino

The checkpoint's folder is in OpenVINO's format (benchmarks.compare.offline.to_openvino).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.compare.offline import child

PACKAGES = ("openvino-genai", "openvino", "openvino-tokenizers", "optimum-intel")


class OpenVINOLibrary:
    """Owner of the pipeline. Settings: `scheduler`, fields of its SchedulerConfig; `properties`, of the device."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in settings["scheduler"].items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings["properties"])
        self._handles: list[tuple[child.Asked, Any]] = []
        self._num_requests = 0

    def run(self, requests: Sequence[child.Asked], began: float) -> None:
        """See child.Library."""
        child.run_stepped(self, requests, began)

    def add(self, request: child.Asked) -> None:
        """See child.Stepped."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.max_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self._num_requests += 1
        self._handles.append((request, self._pipeline.add_request(self._num_requests, ids, config)))

    def step(self, began: float) -> None:
        """See child.Stepped."""
        self._pipeline.step()
        now = time.perf_counter() - began
        for request, handle in self._handles:
            while handle.can_read():
                for output in handle.read().values():
                    request.take(now, list(output.generated_ids))
        self._handles = [(asked, handle) for asked, handle in self._handles if len(asked.tokens) < asked.max_tokens]

    def has_unfinished(self) -> bool:
        """See child.Stepped."""
        return bool(self._pipeline.has_non_finished_requests())


if __name__ == "__main__":
    child.serve(OpenVINOLibrary, PACKAGES)
