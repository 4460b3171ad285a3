"""ProjectService: see project.proto."""

from __future__ import annotations

from typing import Any

from etfarm.server.rpc.edge import later
from etfarm.v1 import project_pb2_grpc


class ProjectService(project_pb2_grpc.ProjectServiceServicer):
    """See project.proto."""

    Create: Any = later("ProjectService.Create")
    List: Any = later("ProjectService.List")
    Update: Any = later("ProjectService.Update")
    AddMember: Any = later("ProjectService.AddMember")
    RemoveMember: Any = later("ProjectService.RemoveMember")
