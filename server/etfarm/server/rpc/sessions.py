"""SessionService: declared; the work is still to come."""

from __future__ import annotations

from typing import Any

from etfarm.server.rpc.edge import later
from etfarm.v1 import session_pb2_grpc


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """See session.proto."""

    Open: Any = later("SessionService.Open")
    Call: Any = later("SessionService.Call")
