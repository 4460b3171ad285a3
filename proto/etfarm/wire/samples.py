"""The samples that the accuracy of a report is over, and how many there may be."""

from __future__ import annotations

from typing import Final

MAX_SAMPLES: Final = 64
"""Maximum number of samples with the timed inputs, which are the first one."""

MAX_SAMPLES_BYTES: Final = 64 << 20
"""Maximum size of the inputs of all samples, which devices fetch before they measure."""

MAX_OUTPUTS_BYTES: Final = 32 << 20
"""Size of the outputs of all samples from which on a device executes no further one."""


class AccuracySamples:
    """The samples of one method: distinct ones in order, as many as their number and their size allow."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._size_bytes = 0
        self.is_full = False
        """Whether no further sample is taken."""

    def take(self, digest: str, size_bytes: int) -> bool:
        """Return whether a sample with this tensor file belongs to them. The first one, the timed inputs, always does."""
        if self.is_full or digest in self._digests:
            return False
        self._size_bytes += size_bytes
        self.is_full = self._size_bytes >= MAX_SAMPLES_BYTES or len(self._digests) == MAX_SAMPLES - 1
        if self._digests and self._size_bytes > MAX_SAMPLES_BYTES:
            return False
        self._digests.add(digest)
        return True


def round_down(samples: int) -> int:
    """Return the number of samples to keep of those that a time limit allowed, a power of two.

    The time that a sample takes varies from run to run, and accuracy over different numbers of samples is not comparable.
    """
    return 1 << (samples.bit_length() - 1)
