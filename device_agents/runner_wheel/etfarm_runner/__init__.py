"""A prebuilt runner bundle of etfarm, which `etfarm serve` offers to devices instead of building one."""

from pathlib import Path
from typing import Final

BUNDLE: Final = Path(__file__).with_name("bundle.tar.xz")
"""The bundle's archive. Its manifest names its architecture, ExecuTorch's version and the digest of the runner's sources."""
