"""Clients of a running gateway: blocking and asyncio, with retries, resumed streams and typed outputs.

`Client` is in `sync_client`, `AsyncClient` in `async_client`; `quire` exports both.
"""
