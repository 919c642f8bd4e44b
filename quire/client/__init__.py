"""Blocking and asyncio clients of a running gateway, with retries, stream resumption and typed outputs.

`Client` is in `sync_client`, `AsyncClient` in `async_client`; `quire` exports both.
"""
