"""ExecuTorch's own Inspector on a program and its ETRecord, as a user opens them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_VALUES_BYTES = 1 << 24


def numeric_gaps_db(pte: Path, etrecord: Path, inputs: Sequence[Any], folder: Path, method: str = "forward") -> list[float]:
    """Run a program once, and return the signal-to-noise ratio of each value that Inspector compares with the ETRecord's graph.

    Args:
        folder: folder of the ETDump and the recorded values.
    """
    from executorch.devtools import Inspector, parse_etrecord
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    module = _load_for_executorch(str(pte), enable_etdump=True, debug_buffer_size=_VALUES_BYTES)
    module.run_method(method, tuple(inputs))
    module.write_etdump_result_to_file(str(folder / "values.etdp"), str(folder / "values.debug"))
    record = parse_etrecord(str(etrecord))
    # Inspector knows no other method, as the script of an export's folder says.
    for maps in (record._debug_handle_map, record._delegate_map, record._instruction_id_to_num_outs_map):
        maps["forward"] = maps[method]
    if isinstance(record.edge_dialect_program, dict):
        record.edge_dialect_program = record.edge_dialect_program[method]
    record.update_representative_inputs(list(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inspector = Inspector(
            etdump_path=str(folder / "values.etdp"), etrecord=record, debug_buffer_path=str(folder / "values.debug")
        )
        gaps = inspector.calculate_numeric_gap("SNR")["gap"]
    return [float(gap[0]) for gap in gaps]
