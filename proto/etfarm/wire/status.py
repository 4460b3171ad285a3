"""Conversion of errors to gRPC statuses and back, by google.rpc.ErrorInfo with the domain `etfarm`, reason and metadata."""

from __future__ import annotations

import re

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from etfarm.v1 import common_pb2
from etfarm.wire.errors import DOMAIN, EtfarmError, Fault, Kind, error_for, error_of

_DETAILS = "grpc-status-details-bin"

_MOST_CHARACTERS = 2000
"""Maximum length of a text in a status; longer ones end with an ellipsis. Trailers are limited: see MAX_METADATA_BYTES."""
_MOST_VALUES = 6000
"""Maximum total length of an error's own metadata; entries beyond it are dropped."""


def to_status(error: EtfarmError) -> grpc.Status:
    """Return the gRPC status of an error, with long texts truncated."""
    metadata: dict[str, str] = {}
    room = _MOST_VALUES
    for key, value in error.metadata.items():
        if (room := room - len(key) - len(_cut(value))) >= 0:
            metadata[key] = _cut(value)
    metadata["fault"] = error.fault.value
    metadata["message"] = _cut(error.message)
    if error.remedy:
        metadata["remedy"] = _cut(error.remedy)
    if error.stage:
        metadata["stage"] = error.stage
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    code = code_pb2.Code.Value(error.kind.value)
    return rpc_status.to_status(status_pb2.Status(code=code, message=_cut(str(error)), details=[detail]))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def from_rpc_error(error: grpc.aio.AioRpcError, *, server: str) -> EtfarmError:
    """Return the error of a failed call.

    Args:
        server: the address to name in messages about the connection.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes) and (known := _from_details(value)) is not None:
            return known
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        why, remedy = _unreachable(details)
        return error_for("SERVER_UNREACHABLE", f"The server at {server} does not answer: {why}.", remedy, server=server)
    if is_unanswered(error):
        return error_for(
            "SERVER_UNREACHABLE",
            f"The server at {server} did not take the call: it is stopping, or too many calls wait there.",
            "Try again in a moment; `etfarm doctor` says whether the server is there.", server=server,
        )  # fmt: skip
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return error_for(
            "UNIMPLEMENTED",
            f"The server at {server} does not have this call: it is of another version.",
            "Update the server, or use a client of its version.", server=server,
        )  # fmt: skip
    kind = Kind(code.name) if code.name in Kind.__members__ else Kind.INTERNAL
    return error_of(Fault.FARM, code.name, f"The server at {server} answered {code.name}: {details}.", kind=kind)


def is_unanswered(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a call ended without an answer: its server is away, or gRPC cancelled the call there.

    gRPC's server cancels the open calls when it stops, and random ones while more of a method wait than it may hold.
    """
    if error.code() is grpc.StatusCode.CANCELLED:
        return all(key != _DETAILS for key, _ in error.trailing_metadata() or ())
    return error.code() is grpc.StatusCode.UNAVAILABLE


def is_hopeless(code: grpc.StatusCode, details: str | None) -> bool:
    """Return whether an address that has never answered is not the server's.

    There is no such name, TLS fails, or it is another program's port.
    """
    return code is grpc.StatusCode.UNAVAILABLE and _HOPELESS.search(details or "") is not None


_HOPELESS = re.compile(
    "SSL_ERROR_SSL|Hostname Verification Check failed|Failed parsing HTTP/2"
    "|errors resolving|DNS resolution failed|address lookup failed"
)
_MISTRUST = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")


def _unreachable(details: str) -> tuple[str, str]:
    """Return why a server was not reached, derived from gRPC's details, and the remedy."""
    if mistrust := _MISTRUST.search(details):
        return (
            f"its certificate is not trusted ({mistrust[1].strip()})",
            "Give --tls-ca (or ETFARM_TLS_CA) the certificate of the authority that signed it.",
        )
    if "Hostname Verification Check failed" in details:
        return (
            "its certificate is for another address",
            "Use the server's name in the certificate, or give the server another certificate.",
        )
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS", "Leave out --tls-ca (and ETFARM_TLS_CA), or start it with --tls-cert and --tls-key."
    return (
        details.splitlines()[0].rstrip(".") if details else "no connection",
        "Check the address (--server or ETFARM_SERVER), that `etfarm serve` runs there, and TLS (--tls-ca).",
    )


def _from_details(data: bytes) -> EtfarmError | None:
    try:
        return _decoded(data)
    except DecodeError:
        return None  # sent by another program or a hostile server; use the status code


def _decoded(data: bytes) -> EtfarmError | None:
    status = status_pb2.Status.FromString(data)
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if not (detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN):
            continue
        metadata = dict(info.metadata)
        fault = _fault(metadata.pop("fault", ""))
        message, remedy, stage = (metadata.pop(key, "") for key in ("message", "remedy", "stage"))
        code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else ""
        kind = Kind(code) if code in Kind.__members__ else Kind.INTERNAL
        return error_of(fault, info.reason, message or status.message, remedy, kind=kind, stage=stage, metadata=metadata)
    return None


def _fault(name: str) -> Fault:
    """Return the fault with this name; FARM for a name that is unknown to this version."""
    return Fault(name) if name in Fault.__members__ else Fault.FARM


def to_proto(error: EtfarmError) -> common_pb2.Error:
    """Return the error as a message for a field of a cell or a result."""
    return common_pb2.Error(
        fault=common_pb2.Fault.Value(f"FAULT_{error.fault.value}"),
        reason=error.reason,
        message=error.message,
        remedy=error.remedy,
        stage=error.stage,
        metadata=error.metadata,
    )


def from_proto(error: common_pb2.Error) -> EtfarmError:
    """Return the exception for the error of a cell or a result."""
    # A newer version or a hostile sender may use a number that is unknown to this version.
    name = common_pb2.Fault.Name(error.fault) if error.fault in common_pb2.Fault.values() else ""
    fault = _fault(name.removeprefix("FAULT_"))
    return error_of(fault, error.reason, error.message, error.remedy, stage=error.stage, metadata=error.metadata)
