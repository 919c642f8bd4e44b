"""Quire's `LLM` in process, driven step by step: python -m benchmarks.compare.offline.with_quire"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.offline import child
from quire import LLM, SamplingParams

PACKAGES = ("quire", "torch", "transformers")


class QuireLibrary:
    """Owner of the LLM."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._llm = LLM(model=model, **settings)
        self._live: dict[str, child.Asked] = {}
        self._num_runs = 0

    def run(self, requests: Sequence[child.Asked], began: float) -> None:
        """See child.Library."""
        self._num_runs += 1
        child.run_stepped(self, requests, began)

    def add(self, request: child.Asked) -> None:
        """See child.Stepped."""
        request_id = f"{self._num_runs}-{request.index}"
        self._live[request_id] = request
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        self._llm.add_request(request_id, request.prompt, params)

    def step(self, began: float) -> None:
        """See child.Stepped."""
        outputs = self._llm.step()
        now = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise output.error
            request = self._live[output.request_id]
            request.take(now, output.outputs[0].token_ids[len(request.tokens) :])
            if output.finished:
                del self._live[output.request_id]

    def has_unfinished(self) -> bool:
        """See child.Stepped."""
        return self._llm.has_unfinished_requests()


if __name__ == "__main__":
    child.serve(QuireLibrary, PACKAGES)
