"""POST /v1/embeddings: convert OpenAI's request and the vectors returned. Pure.

Accepts vLLM's extra fields `normalize` (default: true) and `priority`, and Quire's own `pooling`: "mean"
(default) or "last".
"""

import base64
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gateway_svc.http.json_body import I32, U32, Prompts, parse_body, prompts_of, refuse, unset_if_none
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays

POOLINGS = {None: pb.POOLING_UNSPECIFIED, "mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": (), "messages": ()}


class EmbeddingRequest(BaseModel):
    """The request body. `dimensions`, if given, must be the model's own."""

    model_config = ConfigDict(strict=True, extra="ignore")

    input: Prompts
    model: str = ""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: U32 | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    priority: I32 | None = None
    request_id: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> "EmbeddingRequest":
        """Parse the body; raises InvalidArgument if it is invalid."""
        return parse_body(cls, body, _NEUTRAL)[0]

    def message(self) -> pb.EmbedRequest:
        """Convert to an EmbedRequest."""
        request = pb.EmbedRequest(
            model=self.model,
            pooling=POOLINGS[self.pooling],
            normalize=unset_if_none(self.normalize),
            scheduling=pb.Scheduling(priority=self.priority),
        )
        for prompt in prompts_of(self.input):
            if isinstance(prompt, str):
                request.inputs.add(text=prompt)
            else:
                request.inputs.add(token_ids=pb.TokenIds(ids=prompt))
        return request

    def answer(self, response: pb.EmbedResponse) -> dict[str, Any]:
        """Convert to OpenAI's JSON. Raises InvalidArgument if the vectors have other `dimensions`."""
        size = len(response.embeddings[0].values)
        if self.dimensions not in (None, size):
            refuse("dimensions", f"is {self.dimensions}; vectors of this model have {size}, which cannot be changed")
        data = [
            {"object": "embedding", "index": i, "embedding": self._encoded(embedding)}
            for i, embedding in enumerate(response.embeddings)
        ]
        num_tokens = response.usage.prompt_tokens
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": response.model, "usage": usage}

    def _encoded(self, embedding: pb.Embedding) -> list[float] | str:
        """Vector as numbers, or as base64 of little-endian float32."""
        if self.encoding_format == "base64":
            return base64.b64encode(wire_arrays.pack(embedding.values, wire_arrays.F32)).decode()
        return list(embedding.values)
