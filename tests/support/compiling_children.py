"""A compiler with real workers and a real store, whose children run the cheap tasks of `tests.support.compile_tasks`."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.cache import Cache, Outcome
from etfarm.server.compile.compiler import Compiler, Tasks
from etfarm.server.compile.single_flight import Listener
from etfarm.server.state.engine import Database
from etfarm.server.workers.pool import Finished, Workers
from etfarm.v1 import child_pb2, common_pb2, compile_pb2
from etfarm.v1.job_pb2 import Candidate
from etfarm.wire import recipes
from etfarm.wire.errors import EtfarmError

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.support.compile_tasks"
TASKS = Tasks(f"{MODULE}:quantize", f"{MODULE}:lower", f"{MODULE}:inspect", f"{MODULE}:list_recipes")
WAIT_S = 60.0
FP32 = recipes.parse("xnnpack_fp32").json
INT8 = recipes.parse("xnnpack_pt2e_int8_static_per_channel").json
PLANNED = recipes.from_toml('recipe = "xnnpack_pt2e_int8_static_per_channel"\n[executorch]\nmemory_planning = "naive"\n').json
QUANTIZED = ["QUANTIZE", "TORCH_EXPORT"]
LOWERED = ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]


class RecordingWorkers(Workers):
    """Workers that record the tasks and requests that they run."""

    ran: list[str]
    requests: list[str]

    async def run(self, task: str, request: object, **more: Any) -> Finished:
        self.ran.append(task.partition(":")[2])
        self.requests.append(repr(request))
        return await super().run(task, request, **more)


@dataclass
class ReceivedProgress:
    """The progress that a caller of the compiler received."""

    stages: list[tuple[str, bool, bool]] = field(default_factory=list)
    """(stage, whether it has ended, whether an earlier compilation ran it)."""
    lines: list[str] = field(default_factory=list)
    at: dict[str, asyncio.Event] = field(default_factory=dict)

    def on_stage(self, stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
        self.stages.append((stage, duration_ms is not None, cached))
        self.at.setdefault(stage, asyncio.Event()).set()

    async def until(self, stage: str) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.at.setdefault(stage, asyncio.Event()).wait()


class World:
    """A compiler with its workers, store and cache in one folder."""

    def __init__(self, folder: Path, database: Database, workers: RecordingWorkers) -> None:
        self.folder, self.workers = folder, workers
        self.database = database
        self.store = Store(folder, database)
        self.cache = Cache(self.store, database)
        self.start_compiler()

    def start_compiler(self, *, stage_deadline_s: float = WAIT_S, cache: Cache | None = None) -> None:
        """Replace the compiler by a new one, as after a restart of the server."""
        self.compiler = Compiler(
            self.workers, self.store, self.database, deadline_s=WAIT_S, stage_deadline_s=stage_deadline_s, threads=1, tasks=TASKS,
            cache=cache or self.cache,
        )  # fmt: skip

    async def model(self, orders: str = "", recipe: str = FP32, *, calibration: bytes = b"", **methods: str) -> Candidate:
        created = Candidate(name="net", recipe=recipe)
        created.model.name = "net"
        for name, text in {"forward": orders, **methods}.items():
            created.model.methods[name].exported_program.CopyFrom(await self.store.put(f"{name}\n{text}\n".encode(), "ann"))
        if calibration:
            created.model.methods["forward"].calibration.append(await self.store.put(calibration, "ann"))
        return created

    def compile(
        self,
        candidate: Candidate,
        received: ReceivedProgress | None = None,
        *,
        fresh: bool = False,
        stop_after: str = "",
        project: str = "default",
    ) -> asyncio.Task[Outcome]:
        received = received or ReceivedProgress()
        listener = Listener(received.on_stage, received.lines.append)
        return asyncio.create_task(
            self.compiler.compile(candidate, owner="ann", project=project, fresh=fresh, listener=listener, stop_after=stop_after)
        )

    @property
    def ran(self) -> list[str]:
        """Tasks of the compiling children that were started."""
        return [task for task in self.workers.ran if task != "list_recipes"]

    def folders(self) -> list[str]:
        return [path.name for path in (self.folder / "children").iterdir() if path.name.startswith("job-")]

    def bytes_of(self, artifact: common_pb2.Artifact) -> bytes:
        return self.store.path(artifact.digest).read_bytes()

    def lose(self, artifact: common_pb2.Artifact) -> None:
        self.store.path(artifact.digest).unlink()

    def gate(self) -> Gate:
        return Gate(self.folder / "gates" / "gate")


class Gate:
    """A lock file that children wait for until it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        self._file.close()


def stage_names(stages: Sequence[Any]) -> list[str]:
    return [stage.stage for stage in stages]


def compilation_bytes(**fields: Any) -> bytes:
    """Return the bytes of an answer with these fields of a compilation; a parser merges them into a preceding answer."""
    return child_pb2.CompileResult(compilation=compile_pb2.Compilation(**fields)).SerializeToString()


def error_of(outcome: Outcome) -> EtfarmError:
    assert outcome.error is not None
    return outcome.error
