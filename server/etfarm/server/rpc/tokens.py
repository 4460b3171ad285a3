"""TokenService: see token.proto."""

from __future__ import annotations

from typing import Any

from etfarm.server.rpc.edge import later
from etfarm.v1 import token_pb2_grpc


class TokenService(token_pb2_grpc.TokenServiceServicer):
    """See token.proto."""

    Create: Any = later("TokenService.Create")
    List: Any = later("TokenService.List")
    Revoke: Any = later("TokenService.Revoke")
    Rotate: Any = later("TokenService.Rotate")
