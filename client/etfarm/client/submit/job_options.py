"""The options of a job: a frozen object from the caller's keywords to the JobSpec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.submit.options import chosen_reservation, deadline_stamp, one_spelling, to_list
from etfarm.client.submit.recipes import chosen_recipes
from etfarm.v1 import job_pb2

if TYPE_CHECKING:
    from etfarm.client.submit.calibration import Calibration
    from etfarm.client.submit.inputs import Inputs
    from etfarm.client.submit.preparation import ExampleInputs
    from etfarm.client.submit.recipes import Recipes
    from etfarm.client.transport import transfers
    from etfarm.wire.recipes import Recipe


@dataclass(frozen=True)
class JobOptions:
    """The options of every job, beside its models."""

    recipes: Recipes | None = None
    """Names with arguments, several joined by +, or TOML files, as on the command line; or recipes that were parsed before."""
    _: KW_ONLY
    recipe: Recipes | None = None
    """The same as `recipes`."""
    example_inputs: ExampleInputs | None = None
    """Arguments of `forward` for an nn.Module; for a dict of modules, a dict by method."""
    calibration: Calibration | None = None
    """Samples for static quantization instead of the models' own."""
    batched: bool = False
    """Whether axis 0 of every array of `calibration` indexes the samples."""
    name: str = ""
    """The job's name."""
    on_upload: transfers.Moved | None = None
    """Callback with the number of bytes sent and their total."""
    on_status: Callable[[str], None] | None = None
    """Callback with one sentence about slow work before the job runs, such as an export."""

    def __post_init__(self) -> None:
        """Check the options that the server cannot check.

        Raises:
            BAD_OPTION: both spellings of an option are set, or there is no recipe.
        """
        chosen_recipes(self.recipe, self.recipes)
        self.job_spec()

    @property
    def chosen_recipes(self) -> list[str | Recipe]:
        """The recipes of `recipe` or `recipes`."""
        return chosen_recipes(self.recipe, self.recipes)

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates and inputs."""
        return job_pb2.JobSpec(name=self.name)


@dataclass(frozen=True)
class DeviceJobOptions(JobOptions):
    """The options of a job that runs on devices."""

    _: KW_ONLY
    method: str | Sequence[str] | None = None
    """The same as `methods`."""
    data: Sequence[str | Path] = ()
    """Named data files (.ptd) of a ready program."""
    inputs: Inputs | None = None
    """Inputs of the programs; the models' own example inputs when None. Of a folder of several samples the first one is timed."""
    methods: str | Sequence[str] | None = None
    """Names of the methods to run; the program's only method, or forward, when empty."""
    reservation: str | None = None
    """Id of a reservation, whose devices are used; ETFARM_RESERVATION when None, and none of either when empty."""
    timeout_s: float | None = None
    """Limit of one run, in seconds; the server's default when None."""
    notify: str | Sequence[str] = ()
    """Addresses that get a notice when the job has ended or a gate on it failed: http:// or https://, at most 5."""
    deadline: datetime | timedelta | None = None
    """When the results are needed, or the time until then: the closer it is, the sooner the job's cells run. Cells that have not
    started by then fail."""
    max_wait_s: float | None = None
    """Seconds for which each cell waits for a device before it fails; without a limit when None."""

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates and inputs."""
        return job_pb2.JobSpec(
            name=self.name,
            methods=to_list(one_spelling("method", self.method, "methods", self.methods, ())),
            timeout_s=self.timeout_s,
            reservation_id=chosen_reservation(self.reservation),
            notify_urls=to_list(self.notify),
            deadline_time=deadline_stamp(self.deadline),
            max_wait_s=self.max_wait_s,
        )
