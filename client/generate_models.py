"""Generates the values that the library returns from the messages that they are read from, with the comments of the .proto files.

What differs is in the table below. `--check` says whether the committed module is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from generate_reports import TEXTS, docstring, enum_class
from generate_sync import write
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import agent_pb2, artifact_pb2, common_pb2, compile_pb2, device_pb2, farm_pb2, job_pb2, project_pb2, webhook_pb2
from etfarm.wire.words import word_of

TARGET: Final = Path(__file__).resolve().parent / "etfarm" / "client"


@dataclass(frozen=True)
class Model:
    """How a class differs from its message."""

    message: Descriptor
    omitted: str = ""
    """Fields that it does not have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Attributes by the field or the path that they are read from."""
    always: str = ""
    """Fields that every message has."""
    may_be_none: str = ""
    """Attributes that are None when they are empty, or when the message that they are in is absent."""
    hidden: str = ""
    """Attributes that its representation leaves out."""
    instead: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Code and text of attributes that are computed from a field, by that field; or that have no field."""
    has_methods: bool = False


INSTANTS: Final = {
    "time": "at", "create_time": "created_at", "end_time": "ended_at", "expire_time": "expires_at",
    "last_seen_time": "last_seen_at", "start_time": "started_at",
}  # fmt: skip
"""Attributes of instants whose verb differs from the field's; every other `x_time` is `x_at`."""

DIGEST: Final = {"artifact.digest": "digest", "artifact.size_bytes": "size_bytes"}
DELETED: Final = {"deleted_count": "count", "deleted_bytes": "size_bytes"}
TOKENS: Final = {"revoked_token_ids": "revoked_tokens"}
SEQUENCE: Final = ("sequence: None = None", "")

MODELS: Final = {
    "Project": Model(project_pb2.Project.DESCRIPTOR, "create_time"),
    "RecipeInfo": Model(compile_pb2.RecipeInfo.DESCRIPTOR),
    "Bundle": Model(agent_pb2.RunnerBundle.DESCRIPTOR, "artifact", {**DIGEST, "executorch_version": "executorch"}),
    "Artifact": Model(artifact_pb2.StoredArtifact.DESCRIPTOR, "artifact", DIGEST, always="create_time"),
    "Collected": Model(artifact_pb2.CollectArtifactsResponse.DESCRIPTOR, names=DELETED),
    "RetentionResult": Model(farm_pb2.RetentionResult.DESCRIPTOR, names=DELETED),
    "Agent": Model(agent_pb2.Agent.DESCRIPTOR),
    "RemovedAgent": Model(agent_pb2.RemoveAgentResponse.DESCRIPTOR, names=TOKENS, always="agent"),
    "UpgradeProgress": Model(agent_pb2.UpgradeAgentProgress.DESCRIPTOR),
    "Webhook": Model(webhook_pb2.Webhook.DESCRIPTOR, always="create_time"),
    "WebhookDelivery": Model(webhook_pb2.WebhookDelivery.DESCRIPTOR, always="create_time"),
    "NotifySecret": Model(webhook_pb2.NotifySecret.DESCRIPTOR, hidden="secret"),
    "AgentWheel": Model(farm_pb2.AgentWheel.DESCRIPTOR),
    "FarmServer": Model(farm_pb2.FarmServer.DESCRIPTOR, always="start_time"),
    "ServerInfo": Model(
        farm_pb2.ServerInfo.DESCRIPTOR, "toolchain principal jail oldest_protocol_version disk",
        {
            "principal.name": "principal", "principal.role": "role", "server_time": "server_time", "stopping": "is_stopping",
            "disk.free_bytes": "disk_free_bytes", "disk.full": "is_disk_full",
        },
        always="protocol_version", may_be_none="disk_free_bytes",
    ),
    "ServerSetting": Model(farm_pb2.ServerSetting.DESCRIPTOR),
    "MetricSample": Model(farm_pb2.MetricSample.DESCRIPTOR),
    "Metric": Model(farm_pb2.Metric.DESCRIPTOR),
    "ServerStatus": Model(farm_pb2.ServerStatus.DESCRIPTOR),
    "Cell": Model(
        job_pb2.Cell.DESCRIPTOR,
        "job_id candidate_index version compilation_key selector report_id outputs program etrecord numerics_compilation_key "
        "update_time compile_cached timeline",
        {"candidate_name": "model", "recipe_name": "recipe"}, may_be_none="recipe verdict", has_methods=True,
        instead={
            "device_index": (
                "on_device: bool = True",
                "Whether a device runs the cell's method. A compile-only cell covers all methods, whatever its method name.",
            ),
            "attempts": ("attempts: int = 0", "Number of placements; more than one after device faults."),
            "device": ("device: str | None = None", "Id of the device of the last placement; None before the first one."),
            "started_at": (
                "started_at: datetime | None = None", "When the last placement on a device began; None before the first one.",
            ),
        },
    ),
    "JobInfo": Model(
        job_pb2.Job.DESCRIPTOR, "spec server_version", {"create_time": "submitted_at", "end_time": "finished_at"},
        always="create_time", hidden="cells",
    ),
    "QueuedRun": Model(
        job_pb2.QueuedRun.DESCRIPTOR,
        names={
            "candidate_name": "model", "recipe_name": "recipe", "reservation_id": "reservation",
            "wait_start_time": "waiting_since", "start_estimate_time": "starts_at",
        },
        always="wait_start_time", may_be_none="recipe",
    ),
    "Progress": Model(
        job_pb2.Progress.DESCRIPTOR, "device_name", has_methods=True,
        instead={
            "actor": ('actor: str = ""', "SERVER, or a device's name."),
            "at": ("at: datetime", ""),
            "sequence": ("sequence: None = None", "Only the latest matters: it has no number."),
        },
    ),
    "LogLine": Model(job_pb2.LogLine.DESCRIPTOR, always="time", has_methods=True, instead={"sequence": SEQUENCE}),
    "Cluster": Model(device_pb2.Cluster.DESCRIPTOR),
    "Drain": Model(device_pb2.DeviceDrain.DESCRIPTOR, always="start_time"),
    "DeviceHealth": Model(device_pb2.DeviceHealth.DESCRIPTOR, names={"start_time": "since"}),
    "HealthRun": Model(device_pb2.HealthRun.DESCRIPTOR),
    "HealthEvent": Model(device_pb2.HealthEvent.DESCRIPTOR, always="time"),
    "ReservationInfo": Model(
        device_pb2.Reservation.DESCRIPTOR, "device_ids", always="expire_time",
        instead={"device_id": ("device_ids: tuple[str, ...] = ()", "The devices that are reserved.")},
    ),
    "Device": Model(
        device_pb2.Device.DESCRIPTOR,
        instead={
            "own_runners": (
                "own_runners: tuple[str, ...] = ()",
                "Kinds of the runners that are installed on it, such as `python`; used if the farm has no bundle for it.",
            ),
            "telemetry": (
                "telemetry: Mapping[str, float | bool] = field(default_factory=dict)",
                "Values of the last heartbeat that the device has; keys end with their unit, as in `temperature_c`.",
            ),
            "concurrent_runs": (
                "concurrent_runs: int = 1",
                "Maximum number of runs at the same time, if none of them is measured; a measurement is always alone.",
            ),
            "health": (
                "health: DeviceHealth = field(default_factory=DeviceHealth)",
                "What the farm has learned about the device from runs, faults and health runs.",
            ),
        },
    ),
    "RetiredDevice": Model(
        device_pb2.RetireDeviceResponse.DESCRIPTOR,
        names={**TOKENS, "other_device_ids": "other_devices", "ended_attempt_ids": "ended_attempts"},
        always="device",
    ),
}  # fmt: skip
"""The classes by their names, those that others refer to first."""

CLASSES: Final = {model.message.full_name: name for name, model in MODELS.items()}
ENUMS: Final = {
    "JobState": "", "CellState": "", "DeviceState": "DeviceState.OFFLINE", "HealthState": "HealthState.UNKNOWN",
}  # fmt: skip
"""Enums that have a class, each with its default; every other one is a text."""

HEADER: Final = '''"""The values that the library reads from messages; generated by client/generate_models.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from etfarm.client.model_methods import CellMethods, LogLineMethods, ProgressMethods
from etfarm.client.reports.enums import CellState, JobState
from etfarm.client.reports.json_object import OpenEnum, StateEnum
from etfarm.wire.errors import EtfarmError


'''


def attributes(model: Model) -> Iterator[str]:
    """Yield the attributes of a class with their docstrings."""
    waiting = dict(model.instead)
    for name in [*(path for path in model.names if "." in path), *(each.name for each in model.message.fields)]:
        if name in waiting:
            code, text = waiting.pop(name)
            yield f"    {code}\n{docstring(text)}"
        elif name not in model.omitted.split():
            yield attribute(model, name)
    for code, text in waiting.values():
        yield f"    {code}\n{docstring(text)}"


def attribute(model: Model, path: str) -> str:
    """Return the attribute that is read from a field, or from one of a nested message, with its docstring."""
    source, *inner = (model.message.fields_by_name[part] if at == 0 else part for at, part in enumerate(path.split(".")))
    assert isinstance(source, FieldDescriptor)
    for part in inner:
        assert source.message_type is not None
        source = source.message_type.fields_by_name[str(part)]
    name = model.names.get(path) or name_of(source)
    hint, default = type_of(source)
    if path in model.always.split():
        hint, default = hint.removesuffix(" | None"), ""
    elif name in model.may_be_none.split():
        hint, default = f"{hint} | None", "None"
    options = [f"default={default}"] * bool(default) if "factory" not in default else [default]
    if name in model.hidden.split():
        options.append("repr=False")
    if name != path:
        options.append(f'metadata={{"field": "{path}"}}')
    if len(options) > bool(default) or "factory" in default:
        default = f"field({', '.join(options)})"
    return f"    {name}: {hint}{f' = {default}' if default else ''}\n{docstring(text_of(source))}"


def text_of(source: FieldDescriptor) -> str:
    """Return what a field is, with the words that it may have."""
    text = TEXTS.about(source.full_name)
    if source.enum_type is None or source.enum_type.name in ENUMS:
        return text
    words = [f"`{word_of(source.enum_type, value.number)}`" for value in source.enum_type.values if value.number]
    return f"{text} {', '.join(words[:-1])} or {words[-1]}.".strip()


def name_of(source: FieldDescriptor) -> str:
    """Return the attribute of a field."""
    if source.message_type is None or source.message_type.full_name != Timestamp.DESCRIPTOR.full_name:
        return source.name
    return INSTANTS.get(source.name) or f"{source.name.removesuffix('_time')}_at".replace("expire_at", "expires_at")


def type_of(source: FieldDescriptor) -> tuple[str, str]:
    """Return the type of an attribute and its default."""
    if source.message_type is not None and source.message_type.GetOptions().map_entry:
        return "Mapping[str, str]", "default_factory=dict"
    single, default = single_of(source)
    if source.is_repeated:
        return f"tuple[{single}, ...]", "()"
    if source.has_presence:
        return f"{single} | None", "None"
    return single, default


def single_of(source: FieldDescriptor) -> tuple[str, str]:
    """Return the type of a field's single value and its default."""
    if source.message_type is not None:
        others = {Timestamp.DESCRIPTOR.full_name: "datetime", common_pb2.Error.DESCRIPTOR.full_name: "EtfarmError"}
        return others.get(source.message_type.full_name) or CLASSES[source.message_type.full_name], "None"
    if source.enum_type is not None:
        return (source.enum_type.name, ENUMS[source.enum_type.name]) if source.enum_type.name in ENUMS else ("str", '""')
    types = {source.TYPE_BOOL: ("bool", "False"), source.TYPE_DOUBLE: ("float", "0.0"), source.TYPE_STRING: ("str", '""')}
    return types.get(source.type, ("int", "0"))


def module() -> str:
    """Return the text of the module, not formatted and with imports that are not needed."""
    classes = [enum_class(device_pb2.DeviceState.DESCRIPTOR), enum_class(device_pb2.HealthState.DESCRIPTOR)]
    for name, model in MODELS.items():
        base = f"({name}Methods)" if model.has_methods else ""
        head = f"@dataclass(frozen=True, kw_only=True)\nclass {name}{base}:\n"
        about = docstring(TEXTS.about(model.message.full_name), has_summary=True)
        classes.append("".join([head, about, "\n", *attributes(model)]))
    return HEADER + "\n\n".join(classes)


if __name__ == "__main__":
    sys.exit(write(__doc__ or "", TARGET, {"message_models": module()}, moves_types=False))
