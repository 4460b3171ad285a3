"""What a compilation depends on, as one digest: equal keys have equal outcomes. Nothing is imported to find out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import MappingProxyType
from typing import Final

from etfarm.server.compile.screening.operators import Operators
from etfarm.v1 import common_pb2, compile_pb2, job_pb2
from etfarm.wire import digest as digests
from etfarm.wire.recipes import Component, Quantization, Recipe

PLUGIN_GROUPS = ("etfarm.recipes", "etfarm.stages")
"""Entry points of installed plug-ins."""

_LAST = "TO_EXECUTORCH"

_PACKAGES: Final[Mapping[str, Sequence[str]]] = {
    "coreml": ("coremltools",),
    "coreai": ("coreai-torch", "coreai-opt"),
    "arm": ("ethos-u-vela", "tosa-tools"),
}
"""Compilers of backends that are packages of their own, by the backend; the others' come with ExecuTorch."""


def toolchain() -> compile_pb2.Toolchain:
    """The versions that take part in a compilation; read from the installed packages, nothing is imported."""
    return compile_pb2.Toolchain(**_versions())


@cache
def _versions() -> Mapping[str, str]:
    # Once a process: the packages' metadata takes a millisecond, and another version would need another process anyway.
    return MappingProxyType({name: version(name) for name in ("torch", "executorch", "torchao", "etfarm")})


@cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _package_versions(backends: Iterable[str]) -> dict[str, str]:
    """The versions of what compiles for backends; one that is not installed is missing."""
    packages = {package for backend in backends for package in _PACKAGES.get(backend, ())}
    return {package: found for package in sorted(packages) if (found := _installed(package))}


def _backends(recipe: Recipe) -> set[str]:
    """Whose compilers may take part in a compilation."""
    options = recipe.options
    named = [options.partitioners, *(one.partitioners for one in options.methods.values())]
    return {part.specification.backend for part in recipe.parts} | _names(named) | _quantizing(recipe)


def _quantizing(recipe: Recipe) -> set[str]:
    """Whose packages may take part in a quantization."""
    options = recipe.options
    named = [options.quantizers, *(one.quantizers for one in options.methods.values())]
    parts = (part.specification for part in recipe.parts)
    return {said.backend for said in parts if said.quantization is not Quantization.NONE} | _names(named)


def _names(components: Iterable[Sequence[Component] | None]) -> set[str]:
    return {one.name for ones in components for one in ones or ()}


@dataclass(frozen=True)
class Plan:
    """What there is to do for one candidate."""

    candidate: job_pb2.Candidate
    recipe: Recipe | None
    """None for a ready program."""
    stop_after: str
    """The last stage where that is not TO_EXECUTORCH; empty where a program comes out."""
    key: str
    """The compilation's."""
    quantization_key: str
    """Of what the server quantizes, shared by all compilations that lower it; empty where it quantizes nothing."""

    @property
    def done(self) -> tuple[str, ...]:
        """Stages that are done before a server's stage runs, in their order; a .pt2 is an exported program."""
        said = tuple(stage.stage for stage in self.candidate.stages_done)
        return said if "TORCH_EXPORT" in said else (*said, "TORCH_EXPORT")


def plan(candidate: job_pb2.Candidate, recipe: Recipe | None, stop_after: str = "", operators: Operators | None = None) -> Plan:
    """What is to be done for a candidate that Submit has accepted.

    Args:
        recipe: the candidate's, with what is known of plug-ins; None for a ready program.
        stop_after: a stage of the recipe; empty for all of them.
        operators: that programs may use; a model that was refused may pass by another list.
    """
    if recipe is None:
        described = {"schema": "etfarm.inspection/2", "program": program_digest(candidate.program), **_versions()}
        return Plan(candidate, None, "", digests.of_value(described), "")
    draft = Plan(candidate, recipe, "" if stop_after == _LAST else stop_after, "", "")
    last = recipe.stages.index(stop_after) if stop_after in recipe.stages else len(recipe.stages)
    quantizes = "QUANTIZE" in recipe.stages[: last + 1] and "QUANTIZE" not in draft.done
    common = {
        "methods": {name: method.exported_program.digest for name, method in candidate.model.methods.items()},
        "calibration": calibration_of(candidate) if quantizes else {},
        "stages_done": draft.done,
        "operators": (operators or Operators()).digest,
        **_versions(),
    }
    whole = {
        "references": {n: m.reference.digest for n, m in candidate.model.methods.items() if m.HasField("reference")},
        "schema": "etfarm.compilation/2",
        "constant_methods": {name: artifact.digest for name, artifact in candidate.model.constant_methods.items()},
        "recipe": digests.of_bytes(candidate.recipe.encode()),
        "strict": recipe.strict,
        "stop_after": draft.stop_after,
        "plugins": plugin_versions(recipe.plugins),
        "packages": _package_versions(_backends(recipe)),
        **common,
    }
    quantization = {
        "schema": "etfarm.quantization/1",
        "recipe": recipe.quantization_json,
        # Stages that plug-ins replace come after it.
        "plugins": plugin_versions([part.name for part in recipe.parts if part.is_plugin]),
        "packages": _package_versions(_quantizing(recipe)),
        **common,
    }
    return Plan(candidate, recipe, draft.stop_after, digests.of_value(whole), digests.of_value(quantization) if quantizes else "")


def original_of(method: job_pb2.MethodSource) -> common_pb2.Artifact:
    """The .pt2 that outputs are compared with: before any quantization, as far as the client has sent that."""
    return method.reference if method.HasField("reference") else method.exported_program


def calibration_of(candidate: job_pb2.Candidate) -> dict[str, list[str]]:
    """Digests of the calibration samples by method, in order; methods without any are left out."""
    return {
        name: [artifact.digest for artifact in method.calibration]
        for name, method in candidate.model.methods.items()
        if method.calibration
    }


def plugin_versions(names: Sequence[str]) -> dict[str, str]:
    """The distributions behind plug-ins by the plug-in's name, like `acme-stages 1.2`; one that is not installed is missing."""
    found: dict[str, str] = {}
    if names:
        for group in PLUGIN_GROUPS:
            for entry in entry_points(group=group):
                if entry.name in names and entry.dist is not None:
                    found[f"{group}:{entry.name}"] = f"{entry.dist.name} {entry.dist.version}"
    return found


def program_digest(program: compile_pb2.Program) -> str:
    """A program's digest, over its manifest."""
    data: Mapping[str, str] = {name: artifact.digest for name, artifact in program.data.items()}
    return digests.of_program(program.pte.digest, data)
