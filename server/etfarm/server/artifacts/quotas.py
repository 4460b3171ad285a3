"""Storage limits of projects and agents."""

from __future__ import annotations

from collections.abc import Callable

from etfarm.server.access.scope import agent_holder
from etfarm.server.artifacts.errors import quota_exceeded
from etfarm.server.artifacts.holdings import Holdings
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.staging import Staging


class Quotas:
    """The storage limits of holders. Artifacts that they hold and their unfinished uploads count."""

    def __init__(self, holdings: Holdings, staging: Staging, limits: StoreLimits) -> None:
        self._holdings = holdings
        self._staging = staging
        self._limits = limits
        self.own_limit_bytes: Callable[[str], int | None] = lambda project: None
        """Returns a project's own limit; None for the default."""
        self.has_attempt: Callable[[str], bool] = lambda principal: True
        """Returns whether an agent with a token of the principal has an attempt."""

    async def require(self, holder: str, needed_bytes: int = 0, *, without: str = "") -> None:
        """Raise an error if a project exceeds its storage limit, or an agent has too many uploads without results.

        Args:
            without: digest of the upload to which `needed_bytes` belongs.

        Raises:
            QUOTA_EXCEEDED: with `limit_bytes` and `used_bytes`.
        """
        limit = self._limit_bytes(holder)
        if limit is None:
            return
        used = await self._holdings.used_bytes(holder) + self._staging.staged_bytes(holder, without=without)
        if used + needed_bytes > limit or (not needed_bytes and used >= limit):
            raise quota_exceeded(holder, limit, used, needed_bytes)

    def _limit_bytes(self, holder: str) -> int | None:
        if holder.startswith(agent_holder("")):
            is_idle = not self.has_attempt(holder.removeprefix(agent_holder("")))
            return self._limits.idle_agent_bytes if is_idle else self._limits.agent_bytes
        own = self.own_limit_bytes(holder)
        return self._limits.project_bytes if own is None else own
