"""ETDumps for tests: written and read by ExecuTorch's own flatc."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def written(*runs: Sequence[dict[str, Any]]) -> bytes:
    """Return an .etdp file with a run for each list of profile events."""
    from executorch.devtools.etdump import serialize

    data = [{"name": "Execute", "events": [{"profile_event": event} for event in run]} for run in runs]
    flat: bytes = serialize._convert_to_flatcc(json.dumps({"version": 0, "run_data": data}))
    return len(flat).to_bytes(4, "little") + flat


def event(name: str, start: int, end: int, instruction: int = -1, **more: Any) -> dict[str, Any]:
    """One profile event."""
    return {"name": name, "instruction_id": instruction, "start_time": start, "end_time": end, **more}


def decoded(data: bytes) -> list[list[dict[str, Any]]]:
    """Return the profile events of each run that has some."""
    from executorch.devtools.etdump import serialize

    runs = json.loads(serialize._convert_from_flatcc(data))["run_data"]
    return [[one["profile_event"] for one in run["events"] if "profile_event" in one] for run in runs if run.get("events")]
