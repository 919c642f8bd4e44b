"""transformers' `generate` on one padded batch: python -m benchmarks.compare.offline.with_transformers

A batch runs until its longest request has its tokens; a completed row is still computed, but its tokens are
ignored.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.compare.offline import child


class _Watch(StoppingCriteria):
    """Called after every token: assigns tokens to their requests, and returns which requests are complete."""

    def __init__(self, requests: Sequence[child.Asked], began: float) -> None:
        self._requests, self._began = requests, began

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        now, newest = time.perf_counter() - self._began, input_ids[:, -1].tolist()
        for request, token in zip(self._requests, newest, strict=True):
            if len(request.tokens) < request.max_tokens:
                request.take(now, [token])
        return torch.tensor([len(request.tokens) >= request.max_tokens for request in self._requests])


PACKAGES = ("transformers", "torch")


class TransformersLibrary:
    """Owner of the model."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model = loaded.eval()
        self._pad = 0

    def run(self, requests: Sequence[child.Asked], began: float) -> None:
        """See child.Library. All requests in one batch, padded on the left; arrival times are ignored."""
        width = max(len(request.prompt) for request in requests)
        ids = torch.full((len(requests), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            pad_token_id=self._pad,
            eos_token_id=None,
        )
        watch = StoppingCriteriaList([_Watch(requests, began)])
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=watch)


if __name__ == "__main__":
    child.serve(TransformersLibrary, PACKAGES)
