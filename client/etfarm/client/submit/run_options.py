"""The options of a single run."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from etfarm.client.submit.job_options import DeviceJobOptions
from etfarm.client.submit.options import device_choices, one_spelling
from etfarm.v1 import job_pb2


@dataclass(frozen=True)
class RunOptions(DeviceJobOptions):
    """The options of one run without a measurement, beside its model. There is one recipe at most."""

    device: str | None = None
    """A selector; any device when None."""
    _: KW_ONLY
    devices: str | None = None
    """The same as `device`."""
    threads: int | None = None
    """Number of threads; the number of cores of the fastest cluster when None."""

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates and inputs."""
        spec = super().job_spec()
        spec.devices.extend(device_choices(one_spelling("device", self.device, "devices", self.devices, ""), all_devices=False))
        if self.threads is not None:
            spec.threads.append(self.threads)
        return spec
