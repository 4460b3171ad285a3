"""Errors of a server: what a client makes of a status's details and of a cell's error, `etfarm.wire.status`."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from etfarm.v1 import common_pb2, job_pb2, report_pb2
from etfarm.wire import report, status
from etfarm.wire.errors import EtfarmError, Fault, error_of

TOKENS = (
    b"type.googleapis.com/google.rpc.ErrorInfo",
    b"etfarm",
    b"fault",
    b"USER",
    b"message",
    b"\x08\x10",
    b"\x08\x05",
    b"\x08\xe7\x07",
)


def seeds() -> list[bytes]:
    """Return a status's details, behind d, and an error, a job and a report of the contract, behind e, j and r."""
    error = error_of(Fault.USER, "NO_SUCH_JOB", "There is no job x.", "List them.", metadata={"job": "x"})
    details = dict(status.to_status(error).trailing_metadata or ())["grpc-status-details-bin"]
    created = report_pb2.Report(id="r", state=common_pb2.CELL_STATE_FAILED, error=status.to_proto(error))
    created.operators.add(kind=report_pb2.OPERATOR_KIND_KERNEL, name="k", p50_ns=3.0)
    job = job_pb2.Job(id="j", state=job_pb2.JOB_STATE_FAILED, labels={"a": "b"})
    return [
        b"d" + details,
        b"e" + status.to_proto(error).SerializeToString(),
        b"j" + job.SerializeToString(),
        b"r" + created.SerializeToString(),
        b"e\x08\x63",
        b"j\x28\x63",
        b"r\x2a\x02\x08\x63",
    ]


def fuzz(data: bytes) -> None:
    """Whatever a server answers is an error of the domain, and JSON."""
    kind, rest = data[:1], data[1:]
    if kind == b"d":
        failed = grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(("grpc-status-details-bin", rest)), "no"
        )
        assert isinstance(status.from_rpc_error(failed, server="here"), EtfarmError)
        return
    message = {b"e": common_pb2.Error, b"j": job_pb2.Job}.get(kind, report_pb2.Report)()
    try:
        message.ParseFromString(rest)
    except DecodeError:
        return
    if isinstance(message, common_pb2.Error):
        assert isinstance(status.from_proto(message), EtfarmError)
        assert report.error_json(message)
    elif isinstance(message, job_pb2.Job):
        assert report.dumps(report.document(message, [], None))
    else:
        assert report.dumps(report.document(None, [message], None))
