"""What a person imports: `LLM` and `SamplingParams` in process, `Client` and `AsyncClient` for a running gateway.

Names are loaded when they are first used, so that `import quire` is instant and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from svc_common.version import VERSION as __version__

if TYPE_CHECKING:
    from quire.chat_messages import ChatOptions as ChatOptions
    from quire.client import AsyncClient as AsyncClient
    from quire.client import Client as Client
    from quire.connections import Credentials as Credentials
    from quire.llm import LLM as LLM
    from quire.messages import RequestOptions as RequestOptions
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.outputs import Logprob as Logprob
    from quire.outputs import RequestOutput as RequestOutput
    from quire.outputs import ToolCall as ToolCall
    from quire.retrying import NO_RETRIES as NO_RETRIES
    from quire.retrying import RetryPolicy as RetryPolicy
    from quire.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.sampling_params import PoolingParams as PoolingParams
    from quire.sampling_params import SamplingParams as SamplingParams
    from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AsyncClient": "quire.client",
    "BeamSearchParams": "quire.sampling_params",
    "ChatOptions": "quire.chat_messages",
    "Client": "quire.client",
    "CompletionOutput": "quire.outputs",
    "Credentials": "quire.connections",
    "EmbeddingRequestOutput": "quire.outputs",
    "LLM": "quire.llm",
    "Logprob": "quire.outputs",
    "NO_RETRIES": "quire.retrying",
    "PoolingParams": "quire.sampling_params",
    "RequestOptions": "quire.messages",
    "RequestOutput": "quire.outputs",
    "RetryPolicy": "quire.retrying",
    "SamplingParams": "quire.sampling_params",
    "StructuredOutputsParams": "quire.structured_outputs",
    "ToolCall": "quire.outputs",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604  (built from one table)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
