"""The options of a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from etfarm.client.submit.job_options import JobOptions
from etfarm.v1 import job_pb2


@dataclass(frozen=True)
class CompileOptions(JobOptions):
    """The options of one compilation, beside its models."""

    _: KW_ONLY
    labels: Mapping[str, str] | None = None
    """The job's labels."""
    no_cache: bool = False
    """Whether to compile again what the farm has compiled before."""
    stop_after: str = ""
    """The last stage to run, such as QUANTIZE; the job produces a program when empty."""

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates."""
        return job_pb2.JobSpec(name=self.name, labels=self.labels, no_cache=self.no_cache, stop_after=self.stop_after)
