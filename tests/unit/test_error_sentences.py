"""The sentence of each error class, with example values in the place of its arguments."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from etfarm.wire.errors import EtfarmError, UserError
from tests.support.golden import Golden

phones = importlib.import_module("etfarm.device_agents.adb.phones")

MODULES: Final = (
    "client.errors", "client.export.errors", "client.export.huggingface_folder", "client.formats", "client.web.uploads",
    "client.web.visitors",
    "device_agents.adb.errors", "device_agents.errors", "device_agents.native.toolchain",
    "device_agents.runners.emulator", "device_agents.runners.errors", "device_agents.targets.phones.errors",
    "server.access.projects", "server.artifacts.errors", "server.bootstrap", "server.cluster.errors", "server.compile.errors",
    "server.compile.inputs", "server.compile.screening.errors", "server.compile.screening.expressions", "server.devices.errors",
    "server.extras", "server.jobs.cells.plausibility", "server.jobs.records.requests", "server.jobs.takeups",
    "server.migrate.errors", "server.state.bodies", "server.state.copies", "server.state.damage", "server.transfer.errors",
    "server.workers.errors", "server.workers.request_files", "wire.bundles", "wire.recipes.errors",
)  # fmt: skip
"""Modules whose error classes build their own sentence."""
BY_TYPE: Final[dict[str, Any]] = {
    "int": 7, "float": 2.5, "bool": False, "int | None": 7, "object": 7, "Mapping[str, object]": {"level": 3},
    "BaseException": ValueError("bad value"), "EtfarmError": UserError("The program failed."),
    "Phone": phones.Phone("SERIAL", phones.State.UNAUTHORIZED),
}  # fmt: skip


def error_classes() -> Iterator[type[EtfarmError]]:
    """Yield the classes with a constructor of their own."""
    for name in MODULES:
        module = importlib.import_module(f"etfarm.{name}")
        for value in vars(module).values():
            is_own = inspect.isclass(value) and issubclass(value, EtfarmError) and value.__module__ == module.__name__
            if is_own and "__init__" in vars(value):
                yield value


def example(parameter: inspect.Parameter) -> Any:
    """Return a value of the parameter's type that names the parameter."""
    if parameter.name == "arch":
        return "aarch64"
    kind = str(parameter.annotation)
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    text = parameter.name.upper()
    if kind.startswith(("Sequence[", "Iterable[", "list[")):
        return [f"{text}_1", f"{text}_2"]
    return Path(f"/{text}") if kind == "Path" else text


@pytest.mark.parametrize("error", list(error_classes()), ids=lambda error: f"{error.__module__}.{error.__name__}")
def test_an_error_class_has_its_sentence(golden: Golden, error: type[EtfarmError]) -> None:
    values: dict[str, Any] = {}
    for parameter in list(inspect.signature(error.__init__).parameters.values())[1:]:
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            values[parameter.name] = example(parameter)
    raised = error(**values)
    golden.check(raised)
    assert raised.message[-1] in ".!?:"
