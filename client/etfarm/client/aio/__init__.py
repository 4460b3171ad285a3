"""The asynchronous farm; `client/generate_sync.py` generates the synchronous one from it."""

from etfarm.client.aio.farm import AsyncFarm

__all__ = ["AsyncFarm"]
