"""Clients of a running gateway: blocking and asyncio, with retries, resumed streams and typed outputs.

`Client` is in `sync_client`, `AsyncClient` in `async_client`; `quire` exports both, and so does this package.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # On first use, as `quire` does: parameters and outputs are imported without gRPC.
    if name not in ("AsyncClient", "Client"):
        raise AttributeError(f"module 'quire.client' has no attribute {name!r}")
    return getattr(importlib.import_module("quire"), name)
