"""The number of samples that the accuracy of a report is of."""

from __future__ import annotations

from typing import Final

MAX_SAMPLES: Final = 64
"""Maximum number of samples with the timed inputs, which are the first one."""

MAX_FURTHER_SAMPLES: Final = MAX_SAMPLES - 1
"""Maximum number of samples beside the timed inputs."""

MAX_SAMPLES_BYTES: Final = 64 << 20
"""Maximum size of the inputs of all samples, which devices fetch before they measure."""
