"""The actor on each node. Ray pickles this module by value, so that the cluster's head needs no etfarm."""

from __future__ import annotations


class NodeActor:
    """One node's children, whose calls take and return bytes only.

    Args:
        settings: as of `NodeService`.
    """

    def __init__(self, settings: bytes) -> None:
        from etfarm.server.workers.cluster.node import NodeService

        self._service = NodeService(settings)

    async def call(self, method: str, arguments: bytes, data: bytes) -> bytes:
        """Call a method of the service."""
        return await self._service.call(method, arguments, data)
