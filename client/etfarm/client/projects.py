"""Step 1, client: the projects of a farm, for members to list and for admins to change."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.client import decode
from etfarm.client.models import Project
from etfarm.client.retry import repeat
from etfarm.client.stubs import Stubs
from etfarm.v1 import project_pb2


class AsyncProjects:
    """The projects that the caller is a member of; all of them for an admin. Only admins change them."""

    def __init__(self, stubs: Stubs) -> None:
        """Made by AsyncFarm."""
        self._stubs = stubs.projects
        self._server = stubs.server

    async def list(self) -> list[Project]:
        """Return the projects by name."""
        projects: list[Project] = []
        request = project_pb2.ListProjectsRequest()
        while True:
            answer = await repeat(lambda: self._stubs.List(request), server=self._server)
            projects += [decode.project(message) for message in answer.projects]
            if not answer.next_page_token:
                return projects
            request.page_token = answer.next_page_token

    async def create(self, name: str, members: Sequence[str] = (), *, storage_limit_bytes: int | None = None) -> Project:
        """Make a project.

        Args:
            members: names of tokens.
            storage_limit_bytes: what its artifacts may take together; the server's default when None.

        Raises:
            EtfarmError: BAD_PROJECT; PROJECT_EXISTS; PERMISSION_DENIED.
        """
        request = project_pb2.CreateProjectRequest(name=name, members=members, storage_limit_bytes=storage_limit_bytes)
        return decode.project(await repeat(lambda: self._stubs.Create(request), server=self._server))

    async def add_member(self, project: str, principal: str) -> Project:
        """Make a principal a member. It stays one of `default` only while it is a member of no project, or is added there too.

        Raises:
            EtfarmError: PROJECT_NOT_FOUND; BAD_PROJECT; PERMISSION_DENIED.
        """
        request = project_pb2.AddMemberRequest(project=project, principal=principal)
        return decode.project(await repeat(lambda: self._stubs.AddMember(request), server=self._server))

    async def remove_member(self, project: str, principal: str) -> Project:
        """End a membership. A principal that is a member of no project any more is one of `default`.

        Raises:
            EtfarmError: PROJECT_NOT_FOUND, MEMBER_NOT_FOUND; PERMISSION_DENIED.
        """
        request = project_pb2.RemoveMemberRequest(project=project, principal=principal)
        return decode.project(await repeat(lambda: self._stubs.RemoveMember(request), server=self._server))

    async def limit(self, project: str, storage_limit_bytes: int | None) -> Project:
        """Change what a project's artifacts may take together; None for the server's default.

        Raises:
            EtfarmError: PROJECT_NOT_FOUND; BAD_PROJECT; PERMISSION_DENIED.
        """
        request = project_pb2.UpdateProjectRequest(name=project, storage_limit_bytes=storage_limit_bytes)
        return decode.project(await repeat(lambda: self._stubs.Update(request), server=self._server))
