"""What a cell does, in words: one table for its states and for the phases of servers and agents."""

from __future__ import annotations

from typing import Final

_NUMERICS: Final = "NUMERICS_"
"""Prefix of the stages of the program for the numerics pass."""

_WORDS: Final = {
    "WAIT_FOR_DEVICE": "waiting for a device",
    "WAIT_FOR_WORKER": "waiting for a compile worker",
    "WAIT_FOR_ROOM": "waiting for room on the server's disk",
    "WAIT_FOR_OTHERS": "waiting for the job's other programs",
    "WAIT_FOR_QUIET": "waiting until the server's own work pauses",
    "WAIT_FOR_COOL": "waiting for a cool device",
    "WAIT_FOR_IDLE": "waiting for an idle machine",
    "COMPILE": "compiling",
    "COMPILE_NUMERICS": "compiling for the numerics pass",
    "BUNDLE": "waiting for the runner",
    "FETCH": "fetching the program",
    "LOAD": "loading the program",
    "LOAD_METHOD": "loading the method",
    "RUN": "executing once",
    "WARMUP": "warming up",
    "TIMED": "measuring",
    "OUTPUTS": "reading outputs",
    "TRACED": "tracing operators",
    "SAMPLES": "executing further samples",
    "CALLS": "executing calls in sequence",
    "GENERATE": "generating text",
    "SCORE": "scoring tokens",
    "NUMERICS": "recording the outputs of operators",
    "DEBUG": "recording the outputs of operators",
    "SERVE": "serving calls",
    "UPLOAD": "uploading results",
    "ANALYZE": "analyzing",
}
"""Words by phase; other phases are stages of a compilation, some of which plug-ins add."""


def describe(phase: str) -> str:
    """Return what a cell does in a phase: `measuring`, or `compiling TO_EXECUTORCH`."""
    if phase in _WORDS or not phase:
        return _WORDS.get(phase, "")
    if phase.startswith(_NUMERICS):
        return f"compiling {phase.removeprefix(_NUMERICS)} for the numerics pass"
    return f"compiling {phase}"


def describe_state(state: str) -> str:
    """Return the state of a job or cell: `waiting for device`."""
    return state.lower().replace("_", " ")


def is_wait(phase: str) -> bool:
    """Return whether a cell waits in a phase."""
    return phase.startswith("WAIT_FOR_")
