"""Every rpc of the contract with every kind of caller: the expected statuses, and no leak of a project's data to others.

One real server with a job that a real agent has run and a session that it serves. A new rpc needs a row here.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
from google.protobuf import message_factory
from google.protobuf.message import Message

from etfarm.client import Farm
from etfarm.v1 import (
    agent_pb2,
    artifact_pb2,
    audit_pb2,
    common_pb2,
    comparison_pb2,
    compile_pb2,
    device_pb2,
    farm_pb2,
    job_pb2,
    project_pb2,
    report_pb2,
    session_pb2,
    token_pb2,
    webhook_pb2,
)
from etfarm.wire import digest
from etfarm.wire.chunks import artifact_of
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.contract import RPCS
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.door import Door
from tests.support.door import new_door as new_door
from tests.support.farm import WAIT_FOR_NOTHING, Daemon
from tests.support.programs import program
from tests.support.runner import know_own_runners, runner_archive

pytestmark = pytest.mark.slow(reason="calls every rpc of a server with every kind of token")

WAIT_S: Final = 200.0

# Callers by their place: the name, role and project of their tokens.
NAMES: Final = {
    "admin": ("root", "admin", ""),
    "owner": ("ann-of-vision", "user", "vision-lab"),
    "member": ("ben", "user", "vision-lab"),
    "stranger": ("cat", "user", "audio-lab"),
    "viewer": ("vic", "viewer", "vision-lab"),
    "other_viewer": ("wil", "viewer", "audio-lab"),
    "agent": ("pi", "agent", ""),
    "other_agent": ("imp", "agent", ""),
}
VOID: Final = ("expired", "revoked", "none")
"""Callers whose token is not one, or not one any more."""
OUTSIDERS: Final = ("stranger", "other_viewer", "other_agent", *VOID)
"""Callers who may not learn anything of the project."""

OK, GONE, DENIED, ANONYMOUS = "OK", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED"
PRECONDITION, INVALID, TAKEN = "FAILED_PRECONDITION", "INVALID_ARGUMENT", "ALREADY_EXISTS"
PASSES: Final = "PASSES"
"""Any answer of who was let through: the request is not one that the rpc can work with, or the rpc comes later."""

Row = Mapping[str, str]


def row(**answers: str) -> Row:
    """Return the expected statuses by caller; invalid tokens always get the same."""
    return answers | dict.fromkeys(VOID, ANONYMOUS)


def people(admin: str, owner: str, member: str, stranger: str, viewer: str, other_viewer: str) -> Row:
    """Return a row of an rpc that agents may not call."""
    return row(
        admin=admin, owner=owner, member=member, stranger=stranger, viewer=viewer, other_viewer=other_viewer,
        agent=DENIED, other_agent=DENIED,
    )  # fmt: skip


READ: Final = people(OK, OK, OK, GONE, OK, GONE)
"""What belongs to a project."""
LIST: Final = people(OK, OK, OK, OK, OK, OK)
"""What each finds only its own in."""
OWN: Final = people(OK, OK, DENIED, GONE, DENIED, DENIED)
"""A change of what belongs to a user."""
USERS: Final = people(PASSES, PASSES, PASSES, PASSES, DENIED, DENIED)
READERS: Final = people(PASSES, PASSES, PASSES, PASSES, PASSES, PASSES)
ADMINS: Final = people(PASSES, DENIED, DENIED, DENIED, DENIED, DENIED)
EVERYBODY: Final = row(**dict.fromkeys(NAMES, OK))
MOVERS: Final = row(**(dict.fromkeys(NAMES, OK) | {"viewer": DENIED, "other_viewer": DENIED}))


@dataclass
class World:
    """The server and what a project has on it."""

    address: str
    secrets: dict[str, str] = field(default_factory=dict)
    """By token's holder."""
    job: str = ""
    report: str = ""
    compilation: str = ""
    model: str = ""
    device: str = ""
    pte: common_pb2.Artifact = field(default_factory=common_pb2.Artifact)
    program: compile_pb2.Program = field(default_factory=compile_pb2.Program)
    outputs: str = ""
    session: str = ""
    attempt: str = ""
    private: set[str] = field(default_factory=set)
    """Texts that no caller outside of the project may read anywhere."""

    def call(self, caller: str, rpc: str, request: Message) -> tuple[str, list[Message], str]:
        """Return the status of an rpc, its answers (a stream's first) and its message."""
        method = RPCS[rpc]
        streams = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        with grpc.insecure_channel(self.address) as channel:
            stub = getattr(channel, "_".join(streams))(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            token = self.secrets.get(caller, "")
            metadata = [("authorization", f"Bearer {token}")] if token else []
            sent = iter([request]) if method.client_streaming else request
            try:
                if not method.server_streaming:
                    return OK, [stub(sent, metadata=metadata, timeout=WAIT_S)], ""
                answers = stub(sent, metadata=metadata, timeout=WAIT_S)
                first = next(answers, None)
                answers.cancel()
                return OK, [] if first is None else [first], ""
            except grpc.RpcError as error:
                return error.code().name, [], f"{error.details()} {error.trailing_metadata()}"


Request = Callable[[World, str], Message]


def of_job(kind: type[Message], **more: Any) -> Request:
    """Return a request that names the project's job."""
    return lambda world, caller: kind(job_id=world.job, **more)


def fixed(request: Message) -> Request:
    """Return a factory of a request that is the same for every caller."""
    return lambda world, caller: request


def fresh(world: World, caller: str) -> Message:
    """Return an upload of an empty artifact."""
    return artifact_pb2.UploadArtifactRequest(header=artifact_pb2.UploadHeader(artifact=artifact_of(b"")))


def submit(world: World, caller: str) -> Message:
    """Return a request for a job that compiles the project's program."""
    spec = job_pb2.JobSpec(candidates=[job_pb2.Candidate(name="again", program=world.program)])
    return job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=uuid.uuid4().hex, spec=spec)


def open_session(world: World, caller: str) -> Message:
    """Return a request for a session with the project's program."""
    return session_pb2.OpenSessionRequest(selector=f"id={world.device}", program=world.program)


ABSENT: Final = "a" * 64

TABLE: Final[dict[str, tuple[Request, Row]]] = {
    "ArtifactService.FindMissing": (lambda w, c: artifact_pb2.FindMissingArtifactsRequest(digests=[w.outputs]), MOVERS),
    "ArtifactService.GetUploadStatus": (lambda w, c: artifact_pb2.GetUploadStatusRequest(digest=w.outputs), MOVERS),
    "ArtifactService.Upload": (fresh, MOVERS),
    "ArtifactService.Download": (
        lambda w, c: artifact_pb2.DownloadArtifactRequest(digest=w.pte.digest), READ | {"agent": OK, "other_agent": GONE},
    ),
    "ArtifactService.List": (fixed(artifact_pb2.ListArtifactsRequest()), READERS),
    "ArtifactService.Delete": (fixed(artifact_pb2.DeleteArtifactRequest(digest=ABSENT)), ADMINS),
    "ArtifactService.Collect": (fixed(artifact_pb2.CollectArtifactsRequest(keep_bytes=1 << 60)), ADMINS),
    "ArtifactService.Verify": (fixed(artifact_pb2.VerifyArtifactsRequest()), ADMINS),
    "CompileService.ListRecipes": (fixed(compile_pb2.ListRecipesRequest()), LIST),
    "CompileService.GetCompilation": (lambda w, c: compile_pb2.GetCompilationRequest(key=w.compilation), READ),
    "CompileService.Inspect": (
        lambda w, c: compile_pb2.InspectRequest(digest=w.pte.digest), people(OK, OK, OK, GONE, DENIED, DENIED),
    ),
    # Who holds nothing of the program cannot have it compiled; an admin's own jobs are those of `default`.
    "JobService.Submit": (submit, people(PRECONDITION, OK, OK, PRECONDITION, DENIED, DENIED)),
    "JobService.Get": (of_job(job_pb2.GetJobRequest), READ),
    "JobService.List": (fixed(job_pb2.ListJobsRequest()), LIST),
    "JobService.ListQueue": (fixed(job_pb2.ListQueueRequest()), LIST),
    "JobService.Watch": (of_job(job_pb2.WatchJobRequest), READ),
    "JobService.WatchAll": (fixed(job_pb2.WatchAllJobsRequest()), READERS),
    "JobService.Cancel": (of_job(job_pb2.CancelJobRequest), OWN),
    "JobService.Retry": (of_job(job_pb2.RetryJobRequest), USERS),
    "JobService.TailLog": (of_job(job_pb2.TailJobLogRequest), READ),
    # The job has a tag, so that nobody deletes it.
    "JobService.Delete": (
        of_job(job_pb2.DeleteJobRequest), people(PRECONDITION, PRECONDITION, DENIED, GONE, DENIED, DENIED)
    ),
    "DeviceService.List": (fixed(device_pb2.ListDevicesRequest()), LIST),
    "DeviceService.Get": (lambda w, c: device_pb2.GetDeviceRequest(device_id=w.device), LIST),
    "DeviceService.Watch": (fixed(device_pb2.WatchDevicesRequest()), READERS),
    "DeviceService.Reserve": (fixed(device_pb2.ReserveDeviceRequest()), USERS),
    "DeviceService.Renew": (fixed(device_pb2.RenewReservationRequest()), USERS),
    "DeviceService.Release": (fixed(device_pb2.ReleaseReservationRequest()), USERS),
    "DeviceService.ListReservations": (fixed(device_pb2.ListReservationsRequest()), READERS),
    "DeviceService.ListTelemetry": (lambda w, c: device_pb2.ListDeviceTelemetryRequest(device_id=w.device), LIST),
    "DeviceService.ListHealthEvents": (lambda w, c: device_pb2.ListHealthEventsRequest(device_id=w.device), LIST),
    "DeviceService.CheckHealth": (lambda w, c: device_pb2.CheckHealthRequest(device_id="nothing"), USERS),
    "DeviceService.ClearHealth": (lambda w, c: device_pb2.ClearHealthRequest(device_id="nothing"), ADMINS),
    "DeviceService.Label": (lambda w, c: device_pb2.LabelDeviceRequest(device_id="nothing"), ADMINS),
    "DeviceService.Drain": (lambda w, c: device_pb2.DrainDeviceRequest(device_id="nothing"), ADMINS),
    "DeviceService.Forget": (lambda w, c: device_pb2.ForgetDeviceRequest(device_id="nothing"), ADMINS),
    "DeviceService.Retire": (lambda w, c: device_pb2.RetireDeviceRequest(device_id="nothing"), ADMINS),
    "DeviceService.Restrict": (lambda w, c: device_pb2.RestrictDeviceRequest(device_id=w.device), ADMINS | {"admin": OK}),
    "SessionService.Open": (open_session, people(PRECONDITION, OK, OK, PRECONDITION, DENIED, DENIED)),
    # The call is empty, which is the answer to permitted callers.
    "SessionService.Call": (
        lambda w, c: session_pb2.CallSessionRequest(session_id=w.session, call_id="c"),
        people(INVALID, INVALID, DENIED, GONE, DENIED, DENIED),
    ),
    "SessionService.Generate": (
        lambda w, c: session_pb2.GenerateSessionRequest(session_id=w.session, call_id="c"),
        people(INVALID, INVALID, DENIED, GONE, DENIED, DENIED),
    ),
    "AgentService.Connect": (
        fixed(agent_pb2.AgentMessage(hello=agent_pb2.Hello(agent_id="nobody", protocol_version=9))),
        people(PRECONDITION, *[DENIED] * 5) | {"agent": PRECONDITION, "other_agent": PRECONDITION},
    ),
    "AgentService.ServeSession": (
        lambda w, c: agent_pb2.SessionReply(attempt_id=w.attempt, ready=session_pb2.SessionReady()),
        people(*[DENIED] * 6) | {"agent": TAKEN},
    ),
    "AgentService.Enroll": (
        fixed(agent_pb2.EnrollAgentRequest(protocol_version=PROTOCOL_VERSION, agent_id=str(uuid.UUID(int=0)))),
        ADMINS | {"agent": PASSES, "other_agent": PASSES},
    ),
    "AgentService.ListAgents": (fixed(agent_pb2.ListAgentsRequest()), ADMINS),
    "AgentService.BindAgent": (fixed(agent_pb2.BindAgentRequest(agent_id="nobody", principal="nobody")), ADMINS),
    "AgentService.RemoveAgent": (fixed(agent_pb2.RemoveAgentRequest(agent_id="nobody")), ADMINS),
    "AgentService.UpgradeAgent": (
        fixed(agent_pb2.UpgradeAgentRequest(agent_id="nobody", digest=ABSENT)), ADMINS | {"admin": PRECONDITION},
    ),
    "ReportService.Get": (of_job(report_pb2.GetReportsRequest), READ),
    "ReportService.ListOperators": (lambda w, c: report_pb2.ListOperatorsRequest(report_id=w.report), READ),
    "ReportService.Compare": (lambda w, c: comparison_pb2.CompareRequest(base=w.job, candidate=w.job), READ),
    "ReportService.Tag": (
        lambda w, c: report_pb2.TagJobRequest(job_id=w.job, tag=f"tag-of-{c}"), people(OK, OK, OK, GONE, DENIED, DENIED),
    ),
    "ReportService.ListHistory": (lambda w, c: report_pb2.ListHistoryRequest(model=w.model), READ),
    "ReportService.Analyze": (of_job(report_pb2.AnalyzeJobRequest), OWN),
    "FarmService.GetServerInfo": (fixed(farm_pb2.GetServerInfoRequest()), EVERYBODY),
    "FarmService.ListBundles": (fixed(farm_pb2.ListBundlesRequest()), EVERYBODY),
    "FarmService.AddBundle": (fixed(farm_pb2.AddBundleRequest(digest=ABSENT)), ADMINS | {"admin": PRECONDITION}),
    "FarmService.ApplyRetention": (fixed(farm_pb2.ApplyRetentionRequest(dry_run=True)), ADMINS | {"admin": OK}),
    "FarmService.GetServerStatus": (fixed(farm_pb2.GetServerStatusRequest()), ADMINS | {"admin": OK}),
    "FarmService.GetProof": (fixed(farm_pb2.GetProofRequest()), dict.fromkeys((*NAMES, *VOID), INVALID)),
    "TokenService.Create": (fixed(token_pb2.CreateTokenRequest()), ADMINS),
    "TokenService.List": (fixed(token_pb2.ListTokensRequest()), ADMINS),
    "TokenService.Revoke": (fixed(token_pb2.RevokeTokenRequest(id="nothing")), ADMINS),
    "TokenService.Rotate": (fixed(token_pb2.RotateTokenRequest(id="nothing")), row(**dict.fromkeys(NAMES, PASSES))),
    "ProjectService.Create": (lambda w, c: project_pb2.CreateProjectRequest(name=f"of-{c}"), ADMINS | {"admin": OK}),
    "ProjectService.List": (fixed(project_pb2.ListProjectsRequest()), LIST),
    "ProjectService.Update": (fixed(project_pb2.UpdateProjectRequest(name="vision-lab")), ADMINS | {"admin": OK}),
    "ProjectService.AddMember": (
        fixed(project_pb2.AddMemberRequest(project="vision-lab", principal="dan")), ADMINS | {"admin": OK},
    ),
    "ProjectService.RemoveMember": (
        fixed(project_pb2.RemoveMemberRequest(project="vision-lab", principal="eve")), ADMINS | {"admin": GONE},
    ),
    "AuditService.List": (fixed(audit_pb2.ListAuditEntriesRequest()), ADMINS),
    "WebhookService.Create": (fixed(webhook_pb2.CreateWebhookRequest(url="http://10.0.0.1/")), ADMINS | {"admin": DENIED}),
    "WebhookService.List": (fixed(webhook_pb2.ListWebhooksRequest()), ADMINS | {"admin": OK}),
    "WebhookService.Delete": (fixed(webhook_pb2.DeleteWebhookRequest(id="nothing")), ADMINS | {"admin": GONE}),
    "WebhookService.Test": (fixed(webhook_pb2.TestWebhookRequest(id="nothing")), ADMINS | {"admin": GONE}),
    "WebhookService.ListDeliveries": (fixed(webhook_pb2.ListWebhookDeliveriesRequest()), LIST),
    "WebhookService.GetSecret": (fixed(webhook_pb2.GetNotifySecretRequest()), USERS),
    "WebhookService.ReportGate": (of_job(webhook_pb2.ReportGateRequest, gate="--gate 3%"), OWN),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(new_door: Callable[..., AbstractContextManager[Door]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("table")
    secrets = {caller: f"secret-of-{name}-0123456789" for caller, (name, _, _) in NAMES.items()}
    lines = [f"{name} {role} {secrets[caller]}" for caller, (name, role, _) in NAMES.items()]
    with new_door(folder, lines=lines) as door:
        created = World(door.address, secrets)
        make_projects(created)
        agent = start_agent(created, folder)
        try:
            run_a_job(created, folder)
            session = hold_session(created)
            try:
                yield created
            finally:
                session.cancel()
        finally:
            agent.stop()


def make_projects(world: World) -> None:
    """Create two projects with a user and a viewer each, and invalid tokens."""
    with Farm(world.address, token=world.secrets["admin"]) as farm:
        farm.add_bundle(runner_archive())
        for project in ("vision-lab", "audio-lab"):
            farm.create_project(project, [name for name, _, of in NAMES.values() if of == project])
    world.secrets |= {"expired": unusable(world, "expired"), "revoked": unusable(world, "revoked")}


def unusable(world: World, why: str) -> str:
    """A token of a member of the project that is expired or revoked."""
    lifetime_s = 1e-3 if why == "expired" else None
    request = token_pb2.CreateTokenRequest(
        principal=why, role=common_pb2.ROLE_USER, lifetime_s=lifetime_s, projects=["vision-lab"]
    )
    status, answers, _ = world.call("admin", "TokenService.Create", request)
    assert status == OK
    (created,) = answers
    assert isinstance(created, token_pb2.CreateTokenResponse)
    if why == "revoked":
        assert world.call("admin", "TokenService.Revoke", token_pb2.RevokeTokenRequest(id=created.token.id))[0] == OK
    return created.secret


def start_agent(world: World, folder: Path) -> Daemon:
    """Start a real agent with the token of `agent` and wait until it is connected."""
    know_own_runners(folder / "agent")
    agent = Daemon(
        ["agent", "--server", world.address, "--data", str(folder / "agent"), "--name", "board", "--exit-with-stdin",
         *WAIT_FOR_NOTHING],
        folder / "agent.log", {"ETFARM_TOKEN": world.secrets["agent"]},
    )  # fmt: skip
    agent.start()
    agent.expect("connected to")
    return agent


class Secretive(torch.nn.Module):
    """A network whose name must not leak to other projects."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


def run_a_job(world: World, folder: Path) -> None:
    """A model that is compiled, measured and tagged by the owner."""
    data = program("add").bytes
    (folder / "add.pte").write_bytes(data)
    with Farm(world.address, token=world.secrets["owner"]) as farm:
        farm.compile(folder / "add.pte").wait()
        job = farm.bench(
            Secretive().eval(),
            ["portable"],
            example_inputs=(torch.ones(2, 3),),
            name="secret-job",
            iterations=20,
            warmup=1,
            threads=[1],
        )
        state = job.wait()
        (report,) = json.loads(json.dumps(job.result().json()))["reports"]
        assert state.value == "SUCCEEDED", report["error"]
        farm.tag(job.id, "secret-tag")
    status, answers, _ = world.call("owner", "JobService.Get", job_pb2.GetJobRequest(job_id=job.id))
    assert status == OK
    (known,) = answers
    assert isinstance(known, job_pb2.Job)
    assert known.project == "vision-lab"
    cell = known.cells[0]
    world.job, world.report, world.compilation, world.model = job.id, report["id"], cell.compilation_key, report["model"]["name"]
    world.device, world.outputs = cell.attempts[0].device_id, cell.outputs.digest
    world.pte = artifact_of(data)
    world.program = compile_pb2.Program(pte=world.pte, digest=digest.of_program(world.pte.digest, {}))
    world.private = {
        NAMES["owner"][0], "vision-lab", "secret-job", "secret-tag", world.job, world.report, world.compilation, cell.id,
        cell.attempts[0].id, world.model, world.outputs, cell.program.pte.digest, cell.etrecord.digest, world.pte.digest,
    }  # fmt: skip
    assert all(world.private)


def hold_session(world: World) -> Any:
    """Return a session of the owner, ready on the agent's device; the stream to cancel in the end."""
    channel = grpc.insecure_channel(world.address)
    open_ = channel.unary_stream(
        "/etfarm.v1.SessionService/Open",
        request_serializer=session_pb2.OpenSessionRequest.SerializeToString,
        response_deserializer=session_pb2.SessionEvent.FromString,
    )
    request = session_pb2.OpenSessionRequest(selector=f"id={world.device}", program=world.program, idle_timeout_s=3600)
    events = open_(request, metadata=[("authorization", f"Bearer {world.secrets['owner']}")])
    ready = next(event for event in events if event.WhichOneof("event") in ("ready", "ended"))
    assert ready.HasField("ready"), ready
    status, answers, _ = world.call("owner", "DeviceService.Get", device_pb2.GetDeviceRequest(device_id=world.device))
    assert status == OK
    world.session, world.attempt = ready.session_id, answers[0].attempt_id  # type: ignore[attr-defined]
    assert world.session and world.attempt
    world.private |= {world.session, world.attempt}
    return events


def test_every_rpc_has_a_row_with_every_caller() -> None:
    assert set(TABLE) == set(RPCS)
    for rpc, (_, answers) in TABLE.items():
        assert set(answers) == {*NAMES, *VOID}, rpc


@pytest.mark.parametrize("rpc", sorted(RPCS))
def test_each_rpc_answers_each_caller_as_in_the_table(world: World, rpc: str) -> None:
    request_of, answers = TABLE[rpc]
    wrong = []
    for caller, expected in answers.items():
        request = request_of(world, caller)
        status, messages, details = world.call(caller, rpc, request)
        passed = status not in (DENIED, ANONYMOUS, "INTERNAL", "UNKNOWN") if expected == PASSES else status == expected
        if not passed:
            wrong.append(f"{caller}: {status} instead of {expected} ({details[:200]})")
        asked = str(request)
        reported = details + "".join(str(message) for message in messages)
        leaked = sorted(secret for secret in world.private if secret in reported and secret not in asked)
        if caller in OUTSIDERS and leaked:
            wrong.append(f"{caller} reads {leaked}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rpc", "request_of"),
    [
        ("JobService.Get", lambda key: job_pb2.GetJobRequest(job_id=key)),
        ("JobService.Watch", lambda key: job_pb2.WatchJobRequest(job_id=key)),
        ("JobService.Cancel", lambda key: job_pb2.CancelJobRequest(job_id=key)),
        ("JobService.TailLog", lambda key: job_pb2.TailJobLogRequest(job_id=key)),
        ("JobService.Delete", lambda key: job_pb2.DeleteJobRequest(job_id=key)),
        ("ReportService.Get", lambda key: report_pb2.GetReportsRequest(job_id=key)),
        ("ReportService.ListOperators", lambda key: report_pb2.ListOperatorsRequest(report_id=key)),
        ("ReportService.Compare", lambda key: comparison_pb2.CompareRequest(base=key, candidate=key)),
        ("ReportService.Tag", lambda key: report_pb2.TagJobRequest(job_id=key, tag="mine")),
        ("ReportService.ListHistory", lambda key: report_pb2.ListHistoryRequest(model=key)),
        ("CompileService.GetCompilation", lambda key: compile_pb2.GetCompilationRequest(key=key)),
        ("CompileService.Inspect", lambda key: compile_pb2.InspectRequest(digest=key)),
        ("ArtifactService.Download", lambda key: artifact_pb2.DownloadArtifactRequest(digest=key)),
        ("SessionService.Call", lambda key: session_pb2.CallSessionRequest(session_id=key, call_id="c")),
        ("SessionService.Generate", lambda key: session_pb2.GenerateSessionRequest(session_id=key, call_id="c")),
    ],
)  # fmt: skip
def test_a_foreign_resource_gets_the_same_error_as_a_missing_resource(
    world: World, rpc: str, request_of: Callable[[str], Message]
) -> None:
    named = {
        "ReportService.ListOperators": [world.report], "CompileService.GetCompilation": [world.compilation],
        "ReportService.ListHistory": [world.model, "secret"], "SessionService.Call": [world.session],
        "SessionService.Generate": [world.session],
        "CompileService.Inspect": [world.outputs, world.pte.digest],
        "ArtifactService.Download": [world.outputs, world.pte.digest],
    }  # fmt: skip
    for key in named.get(rpc, [world.job, world.job[:6], "secret-tag"]):
        absent = hashlib.sha256(b"what nobody has").hexdigest()[: len(key)]
        status, _, details = world.call("stranger", rpc, request_of(key))
        control, _, words = world.call("stranger", rpc, request_of(absent))
        assert status == control == GONE
        assert details.replace(key, "K").replace(key[:12], "K") == words.replace(absent, "K").replace(absent[:12], "K")


def test_latest_and_tags_resolve_within_the_callers_project(world: World) -> None:
    latest = job_pb2.GetJobRequest(job_id="latest")
    assert world.call("member", "JobService.Get", latest)[0] == OK
    assert world.call("stranger", "JobService.Get", latest)[0] == GONE
    assert world.call("viewer", "JobService.Get", job_pb2.GetJobRequest(job_id="secret-tag"))[0] == OK
    # The tag is another's, though of the same project; of another project it could be everybody's.
    take = report_pb2.TagJobRequest(job_id=world.job, tag="secret-tag")
    assert world.call("member", "ReportService.Tag", take)[0] == DENIED


def test_a_user_of_another_project_sees_no_artifacts_and_no_jobs(world: World) -> None:
    wanted = artifact_pb2.FindMissingArtifactsRequest(digests=[world.outputs, world.pte.digest])
    for caller, missing in (("owner", []), ("member", []), ("stranger", list(wanted.digests))):
        status, answers, _ = world.call(caller, "ArtifactService.FindMissing", wanted)
        assert (status, list(answers[0].missing)) == (OK, missing), caller  # type: ignore[attr-defined]
    status, answers, _ = world.call(
        "stranger", "ArtifactService.GetUploadStatus", artifact_pb2.GetUploadStatusRequest(digest=world.outputs)
    )
    assert answers == [artifact_pb2.UploadStatus(digest=world.outputs)]
    for caller, count in (("stranger", 0), ("other_viewer", 0), ("admin", 1), ("viewer", 1)):
        _, answers, _ = world.call(caller, "JobService.List", job_pb2.ListJobsRequest())
        assert bool(answers[0].jobs) == bool(count), caller  # type: ignore[attr-defined]


def test_a_user_of_another_project_sees_a_busy_device_without_its_job(world: World) -> None:
    for caller, attempt in (("owner", world.attempt), ("admin", world.attempt), ("stranger", ""), ("other_viewer", "")):
        _, answers, _ = world.call(caller, "DeviceService.Get", device_pb2.GetDeviceRequest(device_id=world.device))
        (device,) = answers
        assert isinstance(device, device_pb2.Device)
        assert (device.state, device.attempt_id) == (device_pb2.DEVICE_STATE_BUSY, attempt), caller


def test_a_call_for_a_project_of_others_is_refused(world: World) -> None:
    with Farm(world.address, token=world.secrets["stranger"], project="audio-lab") as farm:
        assert farm.jobs() == []
    for project in ("vision-lab", "default", "no-such-project"):
        with pytest.raises(Exception, match=f"There is no project '{project}'"):
            Farm(world.address, token=world.secrets["stranger"], project=project).__enter__()
    with Farm(world.address, token=world.secrets["admin"], project="vision-lab") as farm:
        assert farm.job("latest").info.project == "vision-lab"
        assert [project.name for project in farm.projects()][:2] == ["audio-lab", "default"]
    with pytest.raises(Exception, match="There is no project 'no-such-project'"):
        Farm(world.address, token=world.secrets["admin"], project="no-such-project").__enter__()


def test_a_cached_compilation_of_another_project_grants_its_files(world: World) -> None:
    with Farm(world.address, token=world.secrets["stranger"]) as farm:
        job = farm.compile(Secretive().eval(), ["portable"], example_inputs=(torch.ones(2, 3),))
        assert job.wait().value == "SUCCEEDED"
    _, answers, _ = world.call("stranger", "JobService.Get", job_pb2.GetJobRequest(job_id=job.id))
    (known,) = answers
    assert isinstance(known, job_pb2.Job)
    cell = known.cells[0]
    assert cell.compile_cached
    for artifact in (cell.program.pte, cell.etrecord):
        request = artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)
        assert world.call("stranger", "ArtifactService.Download", request)[0] == OK
    request = compile_pb2.GetCompilationRequest(key=cell.compilation_key)
    assert world.call("stranger", "CompileService.GetCompilation", request)[0] == OK
    # What the other project ran with it stays its own.
    request = artifact_pb2.DownloadArtifactRequest(digest=world.outputs)
    assert world.call("stranger", "ArtifactService.Download", request)[0] == GONE
