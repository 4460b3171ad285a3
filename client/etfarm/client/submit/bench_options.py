"""The options of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from etfarm.client.submit.generate import Generate, options_of
from etfarm.client.submit.job_options import DeviceJobOptions
from etfarm.client.submit.options import device_choices, one_spelling, to_list
from etfarm.v1 import job_pb2
from etfarm.wire.measurement import FIELDS, MeasurementOptions

_DEFAULT_MAX_TIME_S: Final = 60.0
"""Maximum duration of a timed pass if Measurement.max_time_s is absent."""


@dataclass(frozen=True)
class BenchOptions(DeviceJobOptions, MeasurementOptions):
    """The options of one benchmark, beside its models: those of its measurement, and what is measured where."""

    devices: str | Sequence[str] | None = None
    """Selectors; each is one cell on one matching device, or one per match with `all_devices`."""
    _: KW_ONLY
    device: str | Sequence[str] | None = None
    """The same as `devices`."""
    all_devices: bool = False
    threads: int | Sequence[int] = ()
    """Numbers of threads, each a cell of its own; the number of cores of the fastest cluster when empty."""
    generate: Generate | int | None = None
    """What to measure of language models, instead of executions of a method: `Generate`, or a number of tokens."""
    labels: Mapping[str, str] | None = None
    """The job's labels."""
    no_cache: bool = False
    """Whether to compile again what the farm has compiled before."""

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates and inputs."""
        known = job_pb2.Measurement.DESCRIPTOR.fields_by_name
        measurement = job_pb2.Measurement(
            # Else agents end a timed pass after 60 s, whatever its minimum.
            max_time_s=self.min_time_s if (self.min_time_s or 0) > _DEFAULT_MAX_TIME_S else None,
            no_profile=not self.profile,
            generation=options_of(self.generate),
            **{name: getattr(self, name) for name in FIELDS if name in known},
        )
        own = job_pb2.JobSpec(
            labels=self.labels,
            devices=device_choices(
                one_spelling("device", self.device, "devices", self.devices, ""), all_devices=self.all_devices
            ),
            threads=to_list(self.threads),
            measurement=measurement,
            priority=self.priority,
            no_cache=self.no_cache,
        )
        own.MergeFrom(super().job_spec())
        return own
