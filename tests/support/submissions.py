"""A submission on a real store, with devices of the test."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.request import UploadRequest
from etfarm.server.compile.upload_screening import Screening, screen
from etfarm.server.jobs.records.deletion import JobDeletion
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.submission import Submission
from etfarm.server.rpc.door import caller
from etfarm.server.rpc.door.token_file import LOCAL
from etfarm.server.rpc.services.jobs import JobService
from etfarm.server.state.engine import Database
from etfarm.server.workers.child_pool import ChildPool
from etfarm.v1.common_pb2 import Artifact
from etfarm.v1.compile_pb2 import Program
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.v1.job_pb2 import Candidate, Job, JobSpec, MethodSource, Model, RetryJobRequest, SubmitJobRequest
from etfarm.wire import recipes
from etfarm.wire.errors import error_for
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.recipes import Recipe

AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
FP32 = recipes.parse("xnnpack_fp32").json
PI = Device(id="pi", name="board", arch="aarch64", state=DeviceState.DEVICE_STATE_IDLE)
OFF = Device(id="off", name="old", arch="aarch64", state=DeviceState.DEVICE_STATE_OFFLINE)
EMU = Device(id="emu", name="emu", arch="x86_64", emulated=True, state=DeviceState.DEVICE_STATE_IDLE)


class RecordedScreening(Screening):
    """Screening whose children are not started: what a .pt2 must be is another room's; here it only has to be asked."""

    def __init__(self, store: Store, screened: list[Path]) -> None:
        super().__init__(cast(ChildPool, None), store.path)
        self._screened = screened

    async def _run(self, task: str, request: UploadRequest, project: str, *, urgent: bool) -> bytes:
        self._screened.append(request.file)
        return b""


class World:
    def __init__(self, store: Store, database: Database) -> None:
        self.store = store
        self.database = database
        self.devices = [EMU, PI, OFF]
        self.screened: list[Path] = []
        numbers = itertools.count()
        self.asked: list[str] = []
        self.submission = Submission(
            store,
            lambda: self.devices,
            self.check,
            lambda: f"id{next(numbers)}",
            RecordedScreening(store, self.screened),
            require_runner=self.require_runner,
        )
        self.without_runner: set[str] = set()
        self.artifacts: dict[bytes, Artifact] = {}

    def require_runner(self, devices: Sequence[Device]) -> None:
        if all(device.arch in self.without_runner for device in devices):
            raise error_for("BUNDLE_MISSING", "no runner", "", arch=devices[0].arch)

    async def check(self, recipe: Recipe) -> Recipe:
        self.asked.append(recipe.name)
        return recipe

    async def stored(self, data: bytes) -> Artifact:
        return await self.store.put(data, "ann")

    async def model(self, name: str = "net", recipe: str = FP32, **methods: bytes) -> Candidate:
        sources = {
            method: MethodSource(exported_program=await self.stored(data))
            for method, data in (methods or {"forward": name.encode()}).items()
        }
        return Candidate(name=name, model=Model(name=name, methods=sources), recipe=recipe)

    async def ready(self, name: str = "x.pte", data: bytes = b"pte", **more: Any) -> Candidate:
        """Return a candidate that is a compiled program."""
        return Candidate(name=name, program=Program(pte=await self.stored(data)), **more)

    async def make(self, spec: JobSpec, *, validate_only: bool = False) -> Job:
        return await self.submission.make(spec, owner="ann", project="default", at=AT, validate_only=validate_only)


class Service:
    """JobService on a real journal, where what it starts is only noted."""

    def __init__(self, world: World) -> None:
        self.started: list[str] = []
        announcer = Announcer()
        self.journal = Journal(world.database, announcer, lambda: AT)
        self.rpcs = JobService(
            self.journal, None, announcer, world.submission, self, version="1", now=lambda: AT,  # type: ignore[arg-type]
            queue=None, deletion=JobDeletion(world.database),
        )  # fmt: skip
        caller.authorize(caller.resolve_default(LOCAL, ""), "/etfarm.v1.JobService/Submit")

    def start(self, job: Job) -> None:
        self.started.append(job.id)

    async def submit(self, spec: JobSpec, request_id: str = "r") -> Job:
        return await self.rpcs.Submit(SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=request_id, spec=spec), None)

    async def retry(self, job: Job, request_id: str = "again") -> Job:
        return await self.rpcs.Retry(RetryJobRequest(job_id=job.id, request_id=request_id), None)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database) -> World:
    created = World(Store(tmp_path, database), database)
    monkeypatch.setattr(screen, "screen_pte", lambda path: created.screened.append(path))
    return created
