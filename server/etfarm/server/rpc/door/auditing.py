"""Audit log entries of rpcs: which rpcs change something, and which fields of their messages name the subject."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from etfarm.server.access.audit import AuditLog, Entry
from etfarm.server.access.tokens import ROLE_NAMES
from etfarm.v1.common_pb2 import Principal

CHANGES: Final[dict[str, tuple[str, str]]] = {
    "ArtifactService.Delete": ("digest", ""),
    "ArtifactService.Collect": ("", ""),
    "ArtifactService.Verify": ("", ""),
    "JobService.Submit": ("", "id"),
    "JobService.Cancel": ("job_id", ""),
    "JobService.Retry": ("job_id", ""),
    "JobService.Delete": ("job_id", "job_id"),
    "DeviceService.Reserve": ("", "id"),
    "DeviceService.Renew": ("reservation_id", ""),
    "DeviceService.Release": ("reservation_id", ""),
    "DeviceService.Label": ("device_id", ""),
    "DeviceService.Drain": ("device_id", ""),
    "DeviceService.Forget": ("device_id", ""),
    "DeviceService.Retire": ("device_id", "device.id device.agent_id"),
    "DeviceService.Restrict": ("device_id", ""),
    "DeviceService.CheckHealth": ("device_id", ""),
    "DeviceService.ClearHealth": ("device_id", ""),
    "SessionService.Open": ("", "session_id"),
    "AgentService.Connect": ("", ""),
    "AgentService.Enroll": ("agent_id", ""),
    "AgentService.BindAgent": ("agent_id", ""),
    "AgentService.RemoveAgent": ("agent_id", "agent.agent_id"),
    "AgentService.UpgradeAgent": ("agent_id", ""),
    "ReportService.Tag": ("job_id", ""),
    "ReportService.Analyze": ("job_id", ""),
    "FarmService.AddBundle": ("digest", ""),
    "FarmService.ApplyRetention": ("keep", ""),
    "TokenService.Create": ("principal", "token.id"),
    "TokenService.Revoke": ("id", "id principal"),
    "TokenService.Rotate": ("id", "token.id"),
    "ProjectService.Create": ("name", ""),
    "ProjectService.Update": ("name", ""),
    "ProjectService.AddMember": ("project", ""),
    "ProjectService.RemoveMember": ("project", ""),
    "WebhookService.Create": ("", "webhook.id"),
    "WebhookService.Delete": ("id", ""),
    "WebhookService.Test": ("id", ""),
    "WebhookService.GetSecret": ("", "project"),
    "WebhookService.ReportGate": ("job_id", ""),
}
"""Rpcs that change something, with the fields of request and response that name the subject. Transfers and calls within a session
are left out: artifacts record their owner, and opening a session is recorded."""

DETAILS: Final = ("principal", "tag", "name", "role", "projects", "selector", "digest", "events")
"""Request fields that are written as the entry's detail."""


def rpc_of(method: str) -> str:
    """Return `JobService.Submit` for `/etfarm.v1.JobService/Submit`."""
    return method.rpartition(".")[2].replace("/", ".")


class Auditor:
    """Writer of the audit entry of one call."""

    def __init__(self, audit: AuditLog, method: str, principal: Principal, peer: str) -> None:
        self._audit = audit
        self._rpc = rpc_of(method)
        self._principal = principal
        self._peer = peer
        self._request: Message | None = None
        self._done = self._rpc not in CHANGES
        self._is_check = False

    def examine(self, request: Any) -> None:
        """Keep the checked request, which names the subject. Streams of requests have no subject."""
        self._request = request if isinstance(request, Message) else None
        self._is_check = getattr(request, "validate_only", False)

    def succeeded(self, answer: Any = None) -> None:
        """Record that the call succeeded, unless it only validated its request, which changes nothing.

        A stream of responses has succeeded once it sends the first one.
        """
        if not self._done and not self._is_check:
            in_request, in_answer = CHANGES[self._rpc]
            answered = [text for path in in_answer.split() for text in _value(answer, path)]
            self._write("OK", list(dict.fromkeys([*_value(self._request, in_request), *answered])))

    def failed(self, reason: str) -> None:
        """Record the reason why the call failed."""
        if not self._done:
            self._write(reason, _value(self._request, CHANGES[self._rpc][0]))

    def _write(self, outcome: str, subject: list[str]) -> None:
        self._done = True
        detail = " ".join(f"{name}={text}" for name in DETAILS for text in _value(self._request, name) if text not in subject)
        entry = entry_of(self._rpc, outcome, self._principal, self._peer, " ".join(subject), detail)
        if outcome == "OK":
            self._audit.change(entry)
        else:
            self._audit.refuse(entry)


def entry_of(rpc: str, outcome: str, principal: Principal | None, peer: str, subject: str = "", detail: str = "") -> Entry:
    """Return the entry of a call; `principal` is None if the caller is unknown."""
    name, role = ("", "") if principal is None else (principal.name, ROLE_NAMES.get(principal.role, ""))
    return Entry(rpc, outcome, name, role, peer, subject, detail)


def _value(message: Message | None, path: str) -> list[str]:
    """Return the text of the field at a dotted path; empty if the field is unset or does not exist."""
    value: Any = message
    for name in path.split(".") if path else ("",):
        field = value.DESCRIPTOR.fields_by_name.get(name) if isinstance(value, Message) else None
        if field is None:
            return []
        value = getattr(value, name)
        if field.enum_type is not None:
            enum_value = field.enum_type.values_by_number.get(value)
            value = enum_value.name if enum_value is not None and value else str(value or "")
    if isinstance(value, (str, int)):
        return [str(value)[:100]] if value else []
    return [",".join(str(item)[:64] for item in list(value)[:8])] if value and not isinstance(value, Message) else []
