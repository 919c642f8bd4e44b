"""What a person imports: `LLM` and `SamplingParams` in process, `Client` and `AsyncClient` for a running gateway.

Names are loaded when they are first used, so that `import quire` is instant and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from svc_common.version import VERSION as __version__

if TYPE_CHECKING:
    from quire.client import AsyncClient as AsyncClient
    from quire.client import Client as Client
    from quire.llm import LLM as LLM
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.outputs import Logprob as Logprob
    from quire.outputs import RequestOutput as RequestOutput
    from quire.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.sampling_params import PoolingParams as PoolingParams
    from quire.sampling_params import SamplingParams as SamplingParams
    from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AsyncClient": "quire.client",
    "BeamSearchParams": "quire.sampling_params",
    "Client": "quire.client",
    "CompletionOutput": "quire.outputs",
    "EmbeddingRequestOutput": "quire.outputs",
    "LLM": "quire.llm",
    "Logprob": "quire.outputs",
    "PoolingParams": "quire.sampling_params",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "quire.sampling_params",
    "StructuredOutputsParams": "quire.structured_outputs",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604  (built from one table)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
