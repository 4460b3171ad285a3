"""The child that looks at an upload before anything loads it. Loads neither torch nor ExecuTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etfarm.server.compile.inspect import facts, sizes
from etfarm.server.compile.request import UploadRequest
from etfarm.server.compile.screening import screen
from etfarm.v1 import compile_pb2
from etfarm.wire import pt2, pte


def screen_upload(request: UploadRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: refuse a .pt2 whose loading could execute code, as `screen.screen_upload`. Return an empty Inspection."""
    screen.screen_upload(request.file, request.operators.targets)
    return b""


def inspect_upload(request: UploadRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: screen a .pt2 or a .pte, and return an Inspection.

    Raises:
        NotAPt2, UnsafeModel, UNKNOWN_OPERATOR: as `screen.screen_upload`.
        NOT_A_PTE, TruncatedProgram: as `screen.screen_pte`.
        UNSUPPORTED_PROGRAM: the flatbuffer of a .pte cannot be read.
    """
    is_program = _begins_as_pte(request.file) if request.is_program is None else request.is_program
    if is_program:
        return _inspect_pte(request.file).SerializeToString()
    screen.screen_upload(request.file, request.operators.targets)
    described = pt2.read_archive(request.file)
    return compile_pb2.Inspection(
        format=compile_pb2.MODEL_FORMAT_PT2, input_names=described.input_names, output_names=described.output_names,
        quantized=described.quantized, transformed=described.transformed,
    ).SerializeToString()  # fmt: skip


def _begins_as_pte(path: Path) -> bool:
    with path.open("rb") as file:
        return pte.identifier_of(file.read(pte.HEAD_BYTES)).startswith(pte.FAMILY)


def _inspect_pte(path: Path) -> compile_pb2.Inspection:
    screen.screen_pte(path)
    described, _ = facts.describe(sizes.read(path))
    return compile_pb2.Inspection(format=compile_pb2.MODEL_FORMAT_PTE, facts=described if described.methods else None)
