"""Models whose bytes this process must not read: the farm reads them in a jailed process and describes them."""

from __future__ import annotations

from pathlib import Path

from etfarm.client.submit.prepared import PreparedMethod, PreparedModel
from etfarm.client.transport import transfers
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import compile_pb2
from etfarm.wire import chunks


async def inspect_on_farm(stubs: Stubs, path: Path, name: str) -> PreparedModel:
    """Upload a .pt2 or .pte, and return it as the farm describes it; see `AsyncSubmissions.inspect`."""
    artifact = await chunks.artifact_of_file(path)
    await transfers.upload_missing(stubs, {artifact.digest: (artifact, path)})
    is_program = path.suffix.lower() == ".pte"
    wanted = compile_pb2.MODEL_FORMAT_PTE if is_program else compile_pb2.MODEL_FORMAT_PT2
    described = await stubs.compiler.Inspect(compile_pb2.InspectRequest(digest=artifact.digest, format=wanted))
    label = name or path.stem
    if is_program:
        return PreparedModel(label, program=path)
    method = PreparedMethod(
        path, input_names=tuple(described.input_names), output_names=tuple(described.output_names),
        transformed=described.transformed, quantized=described.quantized,
    )  # fmt: skip
    return PreparedModel.of(label, {"forward": method})
