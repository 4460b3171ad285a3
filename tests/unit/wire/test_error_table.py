"""The errors that have no class of their own: what the table says of them, and that each is raised with what it may have."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.wire.error_table import ROWS
from etfarm.wire.errors import ANY_KEYS, DeviceError, FarmError, Fault, Kind, UserError, error_for

ROOT = Path(__file__).resolve().parents[3]

PACKAGES = ("proto", "client", "server", "device_agents")


def nodes(text: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of the packages' modules that have a text, each with its file."""
    for package in PACKAGES:
        for file in sorted((ROOT / package / "etfarm").rglob("*.py")):
            for node in ast.walk(ast.parse(source)) if text in (source := file.read_text()) else ():
                yield str(file.relative_to(ROOT)), node


def tried() -> set[str]:
    """Return the reasons whose remedies a test applies."""
    marks = (
        node
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.remedy" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.remedy"
    )
    return {ast.literal_eval(reason) for mark in marks for reason in mark.args}


def remedies() -> dict[str, str]:
    """Return the remedy of each reason in the table."""
    groups = tomllib.loads((ROOT / "docs" / "reasons.toml").read_text()).values()
    return {reason: texts[1] for group in groups for reason, texts in group.items() if reason in ROWS}


UNTRIED = """
ADB_MISSING ADMIN_EXISTS AGENT_BOUND AGENT_FAILED AGENT_HAS_DEVICES AGENT_NOT_FOUND AGENT_NOT_YOURS AGENT_OFFLINE AGENT_OUTDATED
AGENT_RETIRED AGENT_UNBOUND ALREADY_QUANTIZED AMBIGUOUS_DIGEST ARTIFACT_MISSING ARTIFACT_NOT_OF_ATTEMPT ATTEMPT_NOT_RESUMED
ATTEMPT_TIMED_OUT
BACKEND_MISSING BACKUP_FAILED BAD_ANSWER BAD_BLOCKS BAD_CALL BAD_DATA_FILE BAD_METADATA BAD_OPERATORS BAD_PROOF_REQUEST
BAD_RETENTION BAD_RETIREMENT BAD_SAMPLES BAD_SESSION BAD_TIME_RANGE BAD_TOKEN BAD_TOKENIZER BAD_TOKEN_REQUEST BAD_TRACE
BAD_UPGRADE BAD_UPLOAD BAD_VIEW BAD_WEB_OPTION BUNDLE_BUILD_FAILED BUNDLE_MISSING CALIBRATION_FAILED CALIBRATION_MISMATCH
CALL_KNOWN CANCELLED CANNOT_LISTEN CELL_NOT_FOUND CHILD_TOO_MANY_PROCESSES CLIENT_TOOLS_MISSING CLIENT_TOO_OLD
COMPARISON_TOO_LARGE CORES_UNAVAILABLE CPU_UNKNOWN DATABASE_FOREIGN DATABASE_TOO_NEW DATABASE_TOO_OLD DATABASE_UNUSABLE
DATA_FOLDER_IN_USE DATA_FOLDER_UNUSABLE DEVICES_DIFFER DEVICES_UNAVAILABLE DEVICE_BUNDLE_UNUSABLE DEVICE_BUSY DEVICE_CONNECTED
DEVICE_GONE DEVICE_RUNNER_KILLED DEVICE_RUNNER_UNUSABLE DEVICE_SELF_TEST_FAILED DEVICE_UNKNOWN DIM_SPECIALIZED DISK_FULL
DOWNLOAD_TOO_LARGE EDGE_DIALECT_PROGRAM EMULATOR_FAILED ENDLESS_LIST EXTERNAL_CONSTANTS_CLASH EXTRA_MISSING FARM_MOVED FENCED
GENERATION_NOT_REQUESTED GENERATION_UNSUPPORTED HEALTH_RUN_IMPOSSIBLE INPUTS_DIFFER JAIL_INCOMPLETE JOB_NOT_FOUND LIMIT_EXCEEDED
LOCAL_NEEDS_PROGRAM LOCAL_RUNNER_FAILED MALFORMED_REQUEST MAX_WAIT_OVER MESSAGE_OVERDUE METRIC_FAILED MISSING_OUT_VARIANTS
MODEL_FILE_REFUSED MODEL_FILE_STALLED NEEDS_LASTING_FARM NETWORK_NOT_REMOVED NOTHING_TO_COMPARE NOTHING_TO_MOVE NOTHING_TO_RETRY
NOTHING_TO_TRANSFORM NOT_AN_ENROLMENT_TOKEN NOT_A_PTE NOT_CONNECTED NOT_PREPARED_FOR_RECIPE NOT_PRODUCED NOT_SIGNED_IN
NO_CALIBRATION_SAMPLES NO_CANDIDATE NO_COMPILE_NODE NO_CORES NO_EXAMPLE_INPUTS NO_HEADER NO_HELLO NO_HISTORY NO_READY NO_RUNNER
NO_SUCH_DEVICE OPERATOR_MISSING OPERATOR_NOT_CORE_ATEN OPERATOR_WITH_EFFECTS OTHER_BLOBS OTHER_EXPORT OTHER_VERSION
OUTPUTS_DIFFER PAGE_FAILED PAGE_NOT_FOUND PAGE_TIMED_OUT PERMISSION_DENIED PHONE_RUNNER_UNUSABLE PHONE_STORAGE_DAMAGED
PHONE_TAKEN PHONE_TOO_OLD PHONE_UNSUPPORTED PLUGIN_FAILED PROGRAM_DATA_MISSING PROJECTS_CHANGED PROJECT_AMBIGUOUS
PROJECT_NOT_FOUND PROTOCOL_UNSUPPORTED PT2_OF_ANOTHER_TORCH RECIPE_NAME_NOT_FOUND RECIPE_NEEDS_EAGER_MODULE RECIPE_UNAVAILABLE
REMOTE_CODE_REFUSED REPORT_INCOMPLETE RESULT_MISSING RUNNER_CLOSED RUNNER_LACKS RUNNER_LEFT_NO_FILE RUNNER_NOT_CONFINED
SAMPLES_FAILED SAMPLES_LEFT_OUT SCORES_DO_NOT_MATCH SCORING_UNSUPPORTED SEQUENCE_UNKNOWN SERVER_STOPPED SERVER_STOPPING
SERVER_TOO_OLD SESSION_CLOSED SESSION_IDLE SESSION_LOST SESSION_NOT_FOUND SESSION_NOT_READY SESSION_SERVED SET_ASIDE
SIGN_IN_LINK_USED SOURCE_TRANSFORM_FAILED STATE_NOT_SHARED TOKENIZERS_MISSING TOKENS_NOT_READ TOKEN_NOT_FOUND
TOKEN_OUTSIDE_VOCABULARY TOKEN_WITHHELD TOO_FEW_DEVICES TOO_MANY_CALLS TOO_MANY_FILES TOO_MANY_NOTICES TOO_MANY_RANDOM_WEIGHTS
TOO_MANY_WEBHOOKS TRANSFER_TIMED_OUT TRUNCATED_PROGRAM UNBOUNDED_SIZE UNIMPLEMENTED UNKNOWN_QUOTA UNKNOWN_STAGE
UNKNOWN_STRUCTURE UNSUPPORTED_ARCHITECTURE UNSUPPORTED_DTYPES UNSUPPORTED_INPUT UNSUPPORTED_PROGRAM UPGRADE_FAILED
UPGRADE_NOT_ALLOWED UPGRADE_REFUSED UPGRADE_RUNNING UPLOAD_IDLE USAGE WEBHOOK_NOT_FOUND WRONG_OUTPUTS
"""
"""Reasons whose remedies no test applies yet; none may come to it."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of `error_for` in the packages, each with its place."""
    for file, node in nodes("error_for("):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "error_for":
            yield f"{file}:{node.lineno}", node


def test_each_reason_is_raised_and_has_the_metadata_that_the_table_names() -> None:
    keys: dict[str, set[str]] = {reason: set() for reason in ROWS}
    raised = set()
    for place, call in calls():
        reason = call.args[0]
        assert isinstance(reason, ast.Constant) and reason.value in ROWS, place
        raised.add(reason.value)
        keys[reason.value] |= {"*" if each.arg is None else each.arg for each in call.keywords} - {"stage", "remedy", "message"}
    named = {reason: row.partition(": ")[2] for reason, row in ROWS.items()}
    for reason, used in keys.items():
        assert set(named[reason].split()) == ({ANY_KEYS} if ANY_KEYS in used else used), reason
    assert raised == ROWS.keys()


def test_an_error_has_the_fault_and_the_kind_of_its_row() -> None:
    types = {Fault.USER: UserError, Fault.DEVICE: DeviceError, Fault.FARM: FarmError}
    for reason, row in ROWS.items():
        error = error_for(reason, "It is so", "Do this.", stage="LOAD")
        fault, kind = row.partition(": ")[0].split()
        assert (type(error), error.fault, error.kind, error.reason) == (types[Fault(fault)], fault, Kind(kind), reason)
        assert (str(error), error.remedy, error.stage) == ("It is so. Do this.", "Do this.", "LOAD")


def test_an_error_has_its_reason_from_the_start() -> None:
    set_later = {
        file
        for file, node in nodes(".reason")
        if isinstance(node, ast.Attribute)
        and node.attr == "reason"
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) != "self"
    }
    assert set_later == {
        "proto/etfarm/wire/errors.py",  # in the functions that make errors without a class
        "server/etfarm/server/devices/health/book.py",  # of a message
    }


def test_a_remedy_is_tried() -> None:
    """What only a report of a defect helps against has nothing to try."""
    known = remedies()
    assert tried() <= known.keys()
    to_try = {reason for reason, remedy in known.items() if not remedy.startswith("Report it as a defect")}
    assert to_try - tried() == set(UNTRIED.split())


def test_a_reason_or_a_key_that_is_in_no_row_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        error_for("NO_SUCH_REASON", "It is so.")
    with pytest.raises(KeyError, match="MODEL_NOT_FOUND has no"):
        error_for("MODEL_NOT_FOUND", "It is so.", colour="red")
