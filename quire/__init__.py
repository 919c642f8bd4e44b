"""Python API: `LLM` and `SamplingParams` in process, `Client` and `AsyncClient` for a running gateway.

Names are loaded on first use, so that `import quire` is instant and does not need torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from svc_common.version import VERSION as __version__

if TYPE_CHECKING:
    from quire.client.chat_messages import ChatOptions as ChatOptions
    from quire.client.connections import Credentials as Credentials
    from quire.client.messages import RequestOptions as RequestOptions
    from quire.client.outputs import CompletionOutput as CompletionOutput
    from quire.client.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.client.outputs import Logprob as Logprob
    from quire.client.outputs import RequestOutput as RequestOutput
    from quire.client.outputs import ToolCall as ToolCall
    from quire.client.retrying import NO_RETRIES as NO_RETRIES
    from quire.client.retrying import RetryPolicy as RetryPolicy
    from quire.client.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.client.sampling_params import PoolingParams as PoolingParams
    from quire.client.sampling_params import SamplingParams as SamplingParams
    from quire.client.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from quire.client.sync_client import AsyncClient as AsyncClient
    from quire.client.sync_client import Client as Client
    from quire.offline.llm import LLM as LLM

_HOMES = {
    "AsyncClient": "quire.client.sync_client",
    "BeamSearchParams": "quire.client.sampling_params",
    "ChatOptions": "quire.client.chat_messages",
    "Client": "quire.client.sync_client",
    "CompletionOutput": "quire.client.outputs",
    "Credentials": "quire.client.connections",
    "EmbeddingRequestOutput": "quire.client.outputs",
    "LLM": "quire.offline.llm",
    "Logprob": "quire.client.outputs",
    "NO_RETRIES": "quire.client.retrying",
    "PoolingParams": "quire.client.sampling_params",
    "RequestOptions": "quire.client.messages",
    "RequestOutput": "quire.client.outputs",
    "RetryPolicy": "quire.client.retrying",
    "SamplingParams": "quire.client.sampling_params",
    "StructuredOutputsParams": "quire.client.structured_outputs",
    "ToolCall": "quire.client.outputs",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604  (built from one table)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
