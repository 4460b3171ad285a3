"""ProjectService: projects, their members and limits."""

from __future__ import annotations

from typing import Final

from etfarm.server.access.projects import Project, Projects
from etfarm.server.rpc.door.caller import caller, scope
from etfarm.server.state.paging import BadPageToken, page_size
from etfarm.v1 import project_pb2, project_pb2_grpc
from etfarm.wire.names import is_project_name

_PAGE: Final = 100, 500
"""Default and maximum number of projects on a page."""


class ProjectService(project_pb2_grpc.ProjectServiceServicer):
    """The servicer of ProjectService; see project.proto."""

    def __init__(self, projects: Projects) -> None:
        self._projects = projects

    async def Create(self, request: project_pb2.CreateProjectRequest, context: object) -> project_pb2.Project:
        limit = request.storage_limit_bytes if request.HasField("storage_limit_bytes") else None
        return _message(await self._projects.create(request.name, request.members, limit, by=caller().name))

    async def List(self, request: project_pb2.ListProjectsRequest, context: object) -> project_pb2.ListProjectsResponse:
        if request.page_token and not is_project_name(request.page_token):
            raise BadPageToken.of(request.page_token)
        size = page_size(request.page_size, *_PAGE)
        projects, following = await self._projects.page(scope(), request.page_token, size)
        return project_pb2.ListProjectsResponse(projects=map(_message, projects), next_page_token=following)

    async def Update(self, request: project_pb2.UpdateProjectRequest, context: object) -> project_pb2.Project:
        limit = request.storage_limit_bytes if request.HasField("storage_limit_bytes") else None
        return _message(await self._projects.update(request.name, limit))

    async def AddMember(self, request: project_pb2.AddMemberRequest, context: object) -> project_pb2.Project:
        return _message(await self._projects.add_member(request.project, request.principal))

    async def RemoveMember(self, request: project_pb2.RemoveMemberRequest, context: object) -> project_pb2.Project:
        return _message(await self._projects.remove_member(request.project, request.principal))


def _message(project: Project) -> project_pb2.Project:
    message = project_pb2.Project(
        name=project.name,
        created_by=project.created_by,
        members=project.members,
        storage_limit_bytes=project.storage_limit_bytes,
        storage_bytes=project.storage_bytes,
        live_jobs=project.live_jobs,
    )
    message.create_time.FromDatetime(project.created_at)
    return message
