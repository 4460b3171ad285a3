"""Texts that accompany ExecuTorch's own files of a report, for users of its Inspector.

`etfarm.client.jobs.raw_files` downloads the files themselves, which are in a farm's store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etfarm.client.formats import label
from etfarm.wire.escapes import in_a_line

Json = Mapping[str, Any]

SCRIPT = "open_in_inspector.py"
"""File name of the script. Not inspect.py: Python would import that as its own module `inspect` when the script runs."""

ABOUT = {
    "program.pte": "the program that was timed",
    "program.etrecord": "the ETRecord of exactly that export",
    "traced.etdp": "the ETDump of the traced pass",
    "inputs.npz": "the inputs of the run; `etfarm bench --inputs` reads them",
    "outputs.npz": "the program's outputs",
    "report.json": "the report, etfarm.report/1",
    "numerics.pte": "the program of the numerics pass, with a delegate for each operator",
    "numerics.etrecord": "the ETRecord of that",
    "numerics.etdp": "the ETDump of the numerics pass, one iteration",
    "numerics.debug": "the values that the trace refers to",
    SCRIPT: "loads all this into ExecuTorch's Inspector",
}
"""Description of each file."""


def readme(report: Json, files: Sequence[str]) -> str:
    """Return the text of README.txt, with the next steps.

    Args:
        files: the names of the existing files.
    """
    runner = report["runner"] or {}
    version = runner.get("executorch") or ((report["compile"] or {}).get("toolchain") or {}).get("executorch") or ""
    width = max([len(name) for name in files], default=0)
    listed = [f"  {name:<{width}}  {_about(name)}" for name in files]
    missing = [name for name in ("program.etrecord", "traced.etdp") if name not in files]
    lines = [
        f"{label(report)}",
        f"ExecuTorch's own files of etfarm report {report['id']} (cell {report['cell']}, method {report['method']}).",
        "",
        *listed,
        "",
    ]
    if not missing:
        lines.append(f"python {SCRIPT}   needs pip install executorch=={version}" if version else f"python {SCRIPT}")
    else:
        lines.append(f"The Inspector needs {' and '.join(missing)}, which this report does not have.")
    return "".join(f"{in_a_line(line)}\n" for line in lines)


def script(report: Json, files: Sequence[str]) -> str:
    """Return the text of `SCRIPT`: the traced pass in ExecuTorch's Inspector, and the numeric gap if there are values."""
    debugged = {"numerics.etdp", "numerics.debug"} <= set(files)
    record = "numerics.etrecord" if "numerics.etrecord" in files else "program.etrecord"
    return _SCRIPT.format(method=report["method"] or "forward", gap=_GAP.format(record=record) if debugged else "")


def _about(name: str) -> str:
    if name in ABOUT:
        return ABOUT[name]
    if name.endswith(".ptd"):
        return "named data that the program loads"
    return "the exported program as it was lowered" if name.endswith(".pt2") else ""


_SCRIPT = '''"""Opens this folder in ExecuTorch's own Inspector, and leaves it in `inspector`: python -i NAME"""

from pathlib import Path

from executorch.devtools import Inspector, parse_etrecord

HERE = Path(__file__).parent
METHOD = {method!r}


def record(name):
    """Return an ETRecord that the Inspector can read: it knows only `forward` and fails if there are several methods."""
    etrecord = parse_etrecord(str(HERE / name))
    for maps in (etrecord._debug_handle_map, etrecord._delegate_map, etrecord._instruction_id_to_num_outs_map):
        if maps and METHOD in maps:
            maps["forward"] = maps[METHOD]
    if isinstance(etrecord.edge_dialect_program, dict):
        etrecord.edge_dialect_program = etrecord.edge_dialect_program[METHOD]
    return etrecord


inspector = Inspector(etdump_path=str(HERE / "traced.etdp"), etrecord=record("program.etrecord"))
columns = ["event_name", "p10 (ms)", "p50 (ms)", "p90 (ms)", "op_types", "delegate_backend_name"]
print(inspector.to_dataframe()[columns].to_string())
{gap}'''.replace("NAME", SCRIPT)

_GAP = '''

# The numeric gap by ExecuTorch: it takes the exact inputs of the run, and merges what is in one delegate.
import numpy as np
import torch


def inputs():
    """The inputs of the run. `KEY.dtype` says what numpy has no type for, `KEY.dim_order` how KEY lies in memory."""
    arrays = np.load(HERE / "inputs.npz")
    for key in arrays.files:
        if any(key == name + suffix for name in arrays.files for suffix in (".dtype", ".dim_order")):
            continue
        dtype = str(arrays[key + ".dtype"]) if key + ".dtype" in arrays else None
        if dtype == "scalar":
            yield arrays[key].item() if arrays[key].size else None
            continue
        value = torch.from_numpy(arrays[key])
        value = value if dtype is None else value.view(getattr(torch, dtype))
        if key + ".dim_order" in arrays:
            order = arrays[key + ".dim_order"].tolist()
            value = value.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
        yield value


numerics_record = record("{record}")
numerics_record.update_representative_inputs(list(inputs()))
numerics = Inspector(
    etdump_path=str(HERE / "numerics.etdp"),
    etrecord=numerics_record,
    debug_buffer_path=str(HERE / "numerics.debug"),
)
print(numerics.calculate_numeric_gap("SNR")[["aot_ops", "runtime_ops", "gap"]].to_string())
'''
