"""This machine's own runner, used if the farm sends none: ExecuTorch's Python binding, queried once and remembered."""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from etfarm.device_agents.runners.python import PythonRunner
from etfarm.v1 import device_pb2
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.errors import EtfarmError
from etfarm.wire.words import number_of

log = logging.getLogger(__name__)

REMEMBERED: Final = "own-runners.json"
"""Name of the file in the agent's data folder."""
WORKING_BACKENDS: Final = frozenset({"XnnpackBackend"})
"""Backends that ExecuTorch's wheel contains completely. It reports others as available (QnnBackend), but their missing
libraries or hardware show only when a program is loaded."""

ANSWER_S: Final = 30.0
"""Seconds within which the binding must answer. Importing torch takes a second on a PC, and several on a board."""


async def own_runners(folder: Path, answer_s: float = ANSWER_S) -> list[device_pb2.DeviceRunner]:
    """Return the binding, if it is installed and works; failures are logged.

    Args:
        folder: the agent's data folder. An earlier answer kept there is valid as long as the versions are the same.
        answer_s: seconds within which the binding must answer.
    """
    versions = _versions()
    if versions is None or not PythonRunner.available():
        return []
    path = folder / REMEMBERED
    remembered = _remembered(path, versions)
    if remembered is not None:
        return remembered
    scratch = folder / "own-runners"
    try:
        scratch.mkdir(exist_ok=True)
        async with asyncio.timeout(answer_s), PythonRunner.start(scratch) as runner:
            hello = await runner.hello()
        backends = [name for name in hello.backends if name in WORKING_BACKENDS]
        description: dict[str, Any] = {
            "kind": runner.kind,
            "executorch": hello.executorch,
            "backends": backends,
            "operators": list(hello.operators),
        }
        text = json.dumps({"versions": versions, "runners": [description]}, indent=1)
        await asyncio.to_thread(write_atomically, path, text.encode(), durable=True)
        return [_message(description)]
    except (EtfarmError, TimeoutError, OSError) as error:
        reason = str(error) or f"it did not answer within {answer_s:g} s"
        log.warning("ExecuTorch is installed here, and its Python binding cannot be used: %s", reason)
        return []
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remembered(path: Path, versions: Mapping[str, str]) -> list[device_pb2.DeviceRunner] | None:
    """Return what `own_runners` kept; None if there is nothing, or it belongs to other versions."""
    try:
        kept: Any = json.loads(path.read_text())
        if kept["versions"] != versions:
            return None
        return [_message(runner) for runner in kept["runners"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged and built again: %s", path, error)
        return None


def _message(description: Mapping[str, Any]) -> device_pb2.DeviceRunner:
    """Return the message of a runner that the agent's data folder describes, with the word for its kind."""
    kind = number_of(RunnerKind.DESCRIPTOR, description["kind"])
    if kind is None:
        raise ValueError(f"no kind of runner: {description['kind']!r}")
    return device_pb2.DeviceRunner(**{**description, "kind": kind})


def _versions() -> dict[str, str] | None:
    """Return the versions that an answer depends on; None if the binding is not installed."""
    try:
        packages = {name: version(name) for name in ("torch", "executorch", "etfarm")}
    except PackageNotFoundError:
        return None
    return packages | {"python": platform.python_version(), "arch": platform.machine()}
