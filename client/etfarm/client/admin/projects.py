"""The projects of a farm: members list them, admins change them."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.client.models import Project
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.paging import iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import project_pb2


class AsyncProjects:
    """The projects that the caller is a member of; all of them for an admin. Only admins change them."""

    def __init__(self, stubs: Stubs) -> None:
        """Wrap a connection's stubs; use `AsyncFarm.projects`."""
        self._stubs = stubs.projects
        self._server = stubs.server

    async def __call__(self) -> Sequence[Project]:
        """Return the same as `list`."""
        return await self.list()

    async def list(self) -> list[Project]:
        """Return the projects, sorted by name."""
        rows = iterate_rows(self._stubs.List, project_pb2.ListProjectsRequest(), "projects", server=self._server)
        return [decoded(Project, message) async for message in rows]

    async def create(self, name: str, members: Sequence[str] = (), *, storage_limit_bytes: int | None = None) -> Project:
        """Create a project.

        Args:
            members: principals, which are names of tokens.
            storage_limit_bytes: limit of all its artifacts together; the server's default when None.

        Raises:
            EtfarmError: BAD_PROJECT; PROJECT_EXISTS; PERMISSION_DENIED.
        """
        request = project_pb2.CreateProjectRequest(name=name, members=members, storage_limit_bytes=storage_limit_bytes)
        return decoded(Project, await self._stubs.Create(request))

    async def add_member(self, project: str, principal: str) -> Project:
        """Add a member. A member's first project replaces `default`, unless the principal is added there as well.

        Raises:
            EtfarmError: PROJECT_NOT_FOUND; BAD_PROJECT; PERMISSION_DENIED.
        """
        request = project_pb2.AddMemberRequest(project=project, principal=principal)
        return decoded(Project, await self._stubs.AddMember(request))

    async def remove_member(self, project: str, principal: str) -> Project:
        """Remove a member. A principal without any project is a member of `default`.

        Raises:
            EtfarmError: PROJECT_NOT_FOUND, MEMBER_NOT_FOUND; PERMISSION_DENIED.
        """
        request = project_pb2.RemoveMemberRequest(project=project, principal=principal)
        return decoded(Project, await self._stubs.RemoveMember(request))

    async def limit(self, project: str, storage_limit_bytes: int | None) -> Project:
        """Set the storage limit of a project's artifacts; None for the server's default.

        Raises:
            EtfarmError: PROJECT_NOT_FOUND; BAD_PROJECT; PERMISSION_DENIED.
        """
        request = project_pb2.UpdateProjectRequest(name=project, storage_limit_bytes=storage_limit_bytes)
        return decoded(Project, await self._stubs.Update(request))
