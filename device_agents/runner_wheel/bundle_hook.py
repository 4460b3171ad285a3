"""The build hook of the wheel `etfarm-runner`: builds the bundle, and adds it with the licenses of what it contains."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from etfarm.device_agents.native.build import build_bundle

_SYSTEM_LICENSES: Final = {
    "glibc": Path("/usr/share/doc/libc6/copyright"),
    "libstdc++": Path("/usr/share/doc/libstdc++6/copyright"),
}
"""Of the system libraries in a bundle, where Debian keeps their licenses."""


class BundleHook(BuildHookInterface):  # type: ignore[misc]
    """Build the bundle for `ETFARM_RUNNER_ARCH`, by default this machine's architecture."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the bundle and its licenses to the wheel, and tag the wheel for Linux on the bundle's architecture.

        Raises:
            EtfarmError: the bundle cannot be built.
        """
        arch = os.environ.get("ETFARM_RUNNER_ARCH") or platform.machine()
        self._folder = tempfile.TemporaryDirectory(prefix="etfarm-runner-")
        archive = Path(self._folder.name) / "bundle.tar.xz"
        build_bundle(arch, archive, say=lambda line: print(line, file=sys.stderr, flush=True))
        files = {archive: "bundle.tar.xz"}
        for path in distribution("executorch").files or ():
            if path.name == "LICENSE" and path.parent.name == "licenses":
                files[Path(str(path.locate()))] = "licenses/executorch.txt"
        files |= {path: f"licenses/{name}.txt" for name, path in _SYSTEM_LICENSES.items() if path.exists()}
        build_data["force_include"].update({str(path): f"etfarm_runner/{name}" for path, name in files.items()})
        build_data["pure_python"] = False
        # A bundle contains its C library, and runs wherever the kernel does.
        build_data["tag"] = f"py3-none-manylinux2014_{arch}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the folder that the bundle was built in."""
        self._folder.cleanup()
