"""Download of a report's raw data, ExecuTorch's own files, from the farm's store to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.errors import OutputUnwritable
from etfarm.client.formats import executorch
from etfarm.client.jobs import series
from etfarm.client.jobs.file_names import data_file_name, safe_name
from etfarm.client.submit import npz
from etfarm.client.transport import transfers
from etfarm.v1 import common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.wire import report as projection
from etfarm.wire import tensors

if TYPE_CHECKING:
    from etfarm.client.transport.stubs import Stubs


async def save(stubs: Stubs, job: job_pb2.Job, cell: job_pb2.Cell, report: report_pb2.Report, folder: Path) -> list[Path]:
    """Write the raw data of a report to `folder`, which is created.

    That is its program, ETRecord, ETDump, inputs, outputs and numerics.

    Missing files, such as the ETRecord of a ready program, are skipped; README.txt lists the files, and a script
    loads them into ExecuTorch's Inspector. Return the files, README.txt first.

    Raises:
        OutputUnwritable: a file cannot be written.
        EtfarmError: as ArtifactService.Download, such as a removed artifact; SERVER_UNREACHABLE.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputUnwritable(f"{folder} cannot be created: {error.strerror}.", "Give another folder.", path=folder) from None
    compiled = await _compilation(stubs, cell.compilation_key)
    names = []
    for name, artifact in {**_of_program(cell, compiled), **await _of_numerics(stubs, cell, report)}.items():
        await transfers.download_file(stubs, artifact, folder / name)
        names.append(name)
    values = {"inputs.npz": _inputs(job, cell, compiled), "outputs.npz": report.outputs if report.HasField("outputs") else None}
    for name, tensor_file in values.items():
        if tensor_file is not None:
            await _save_values(stubs, tensor_file, cell.method, folder / name)
            names.append(name)
    if report.HasField("etdump"):
        await transfers.download_file(stubs, report.etdump, folder / "traced.etdp")
        names.append("traced.etdp")
    (report_json,) = await series.documents(stubs, [report])
    texts = {"report.json": projection.dumps({**projection.document(job, (), None), "reports": [report_json]})}
    if {"traced.etdp", "program.etrecord"} <= set(names):
        texts[executorch.SCRIPT] = executorch.script(report_json, names)
    texts["README.txt"] = executorch.readme(report_json, sorted([*names, *texts]))
    for name, text in texts.items():
        _write(folder / name, text)
    return [folder / "README.txt", *(folder / name for name in sorted([*names, *texts]) if name != "README.txt")]


async def _compilation(stubs: Stubs, key: str) -> compile_pb2.Compilation | None:
    if not key:
        return None
    request = compile_pb2.GetCompilationRequest(key=key)
    return await stubs.compiler.GetCompilation(request)


def _of_program(cell: job_pb2.Cell, compiled: compile_pb2.Compilation | None) -> dict[str, common_pb2.Artifact]:
    files = {}
    if cell.HasField("program"):
        files["program.pte"] = cell.program.pte
        files.update({data_file_name(name): artifact for name, artifact in cell.program.data.items()})
    if cell.HasField("etrecord"):
        files["program.etrecord"] = cell.etrecord
    if compiled is not None:
        exported = {name: artifact for name, artifact in compiled.exported_programs.items() if name == cell.method}
        files.update({safe_name(f"{name}.pt2"): artifact for name, artifact in exported.items()})
    return files


async def _of_numerics(stubs: Stubs, cell: job_pb2.Cell, report: report_pb2.Report) -> dict[str, common_pb2.Artifact]:
    files = {}
    if report.HasField("numerics_etdump"):
        files["numerics.etdp"] = report.numerics_etdump
    if report.HasField("numerics_debug"):
        files["numerics.debug"] = report.numerics_debug
    if files and (compiled := await _compilation(stubs, cell.numerics_compilation_key)) is not None:
        if compiled.HasField("program"):
            files["numerics.pte"] = compiled.program.pte
        if compiled.HasField("etrecord"):
            files["numerics.etrecord"] = compiled.etrecord
    return files


def _inputs(job: job_pb2.Job, cell: job_pb2.Cell, compiled: compile_pb2.Compilation | None) -> common_pb2.Artifact | None:
    """Return the tensor file of the method's inputs; None for a ready program, for which the runner generated inputs."""
    inputs: list[Mapping[str, common_pb2.Artifact]] = [job.spec.inputs, compiled.example_inputs if compiled is not None else {}]
    return next((by_method[cell.method] for by_method in inputs if cell.method in by_method), None)


async def _save_values(stubs: Stubs, artifact: common_pb2.Artifact, method: str, path: Path) -> None:
    values = tensors.decode(await transfers.download_bytes(stubs, artifact))
    npz.write_outputs(path, {method: values}, {method: [value.name for value in values]}, with_dim_orders=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror}.", "Give another folder.", path=path) from None
