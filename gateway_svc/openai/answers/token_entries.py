"""Format tokens with logprobs as entries of OpenAI's chat answers, and as vLLM's list for prompts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from gateway_svc.text.text_model import TextModel
from protos.inference.v1 import inference_pb2 as pb

Json = dict[str, Any]
_NO_TOPS = pb.TopLogprobs()


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Makes entries {token, logprob, bytes, top_logprobs}; `as_ids`: tokens are named "token_id:7" (vLLM)."""

    text: TextModel
    as_ids: bool

    def of(self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[pb.TopLogprobs]) -> list[Json]:
        """Make one entry per token; `tops`: one per token, or empty."""
        return [
            {**self._entry(token_id, logprob), "top_logprobs": self._tops(top)}
            for token_id, logprob, top in zip(token_ids, logprobs, tops or [_NO_TOPS] * len(token_ids), strict=True)
        ]

    def of_prompt(self, token_ids: Sequence[int], known: pb.PromptLogprobs) -> list[Json]:
        """Make one entry per prompt token; `logprob` and `top_logprobs` are None for the first token."""
        begin = known.start_index or 1
        first = [{**self._entry(token_id, None), "top_logprobs": None} for token_id in token_ids[:begin]]
        return first + self.of(known.token_ids, known.logprobs, known.top_logprobs)

    def _tops(self, top: pb.TopLogprobs) -> list[Json]:
        return [self._entry(*pair) for pair in zip(top.token_ids, top.logprobs, strict=True)]

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        raw = self.text.token_bytes(token_id)
        name = f"token_id:{token_id}" if self.as_ids else raw.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(raw)}

    def vllm_prompt_logprobs(self, given: pb.PromptLogprobs | None) -> list[Json | None]:
        """vLLM's list of prompt logprobs.

        None for the first token, then {token id: {logprob, rank, decoded_token}}; unknown ranks are null.
        """
        if given is None:
            return []
        entries: list[Json | None] = [None] * given.start_index
        for token_id, logprob, top in zip_longest(given.token_ids, given.logprobs, given.top_logprobs):
            entries.append(self._ranked(token_id, logprob, top or _NO_TOPS))
        return entries

    def _ranked(self, token_id: int, logprob: float, top: pb.TopLogprobs) -> Json:
        ranked = {t: (value, rank) for rank, (t, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)}
        entry = {token_id: ranked.get(token_id, (logprob, None)), **ranked}
        return {str(t): self._with_rank(t, *found) for t, found in entry.items()}

    def _with_rank(self, token_id: int, logprob: float, rank: int | None) -> Json:
        decoded = self.text.token_bytes(token_id).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": decoded}
