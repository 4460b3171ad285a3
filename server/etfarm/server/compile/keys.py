"""Keys of compilations: a digest of everything that a compilation depends on. Equal keys have equal outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from etfarm.server.compile.screening.operators import Operators
from etfarm.v1 import common_pb2, compile_pb2, job_pb2
from etfarm.wire import digest as digests
from etfarm.wire.recipes import Component, Quantization, Recipe

PLUGIN_GROUPS = ("etfarm.recipes", "etfarm.stages")
"""Entry point groups of installed plug-ins."""

_LAST = "TO_EXECUTORCH"

_PACKAGES: Final[Mapping[str, Sequence[str]]] = {
    "coreml": ("coremltools",),
    "coreai": ("coreai-torch", "coreai-opt"),
    "arm": ("ethos-u-vela", "tosa-tools"),
}
"""Packages with compilers by backend; those of other backends come with ExecuTorch."""


VersionOf = Callable[[str], str]
"""Function that returns the version of a package, and raises PackageNotFoundError for one that is not installed."""


@cache
def _read_version(package: str) -> str | None:
    # Cached: the metadata takes a millisecond to read, and a change of version needs a new process anyway.
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_version(package: str) -> str:
    """Return the version of an installed package from its metadata; does not import the package.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    installed = _read_version(package)
    if installed is None:
        raise PackageNotFoundError(package)
    return installed


def toolchain_versions(version_of: VersionOf = installed_version) -> dict[str, str]:
    """Return the versions of the packages that take part in every compilation."""
    return {name: version_of(name) for name in ("torch", "executorch", "torchao", "etfarm")}


def toolchain() -> compile_pb2.Toolchain:
    """Return the versions that take part in a compilation, from the packages' metadata; imports none of them."""
    return compile_pb2.Toolchain(**toolchain_versions())


def _package_versions(backends: Iterable[str], version_of: VersionOf) -> dict[str, str]:
    """Return the versions of the backends' compilers; packages that are not installed are left out."""
    versions: dict[str, str] = {}
    for package in sorted({package for backend in backends for package in _PACKAGES.get(backend, ())}):
        with suppress(PackageNotFoundError):
            versions[package] = version_of(package)
    return versions


def _backends(recipe: Recipe) -> set[str]:
    """Return the backends whose compilers may take part in a compilation."""
    options = recipe.options
    named = [options.partitioners, *(method.partitioners for method in options.methods.values())]
    return {part.specification.backend for part in recipe.parts} | _component_names(named) | _quantizing_backends(recipe)


def _quantizing_backends(recipe: Recipe) -> set[str]:
    """Return the backends whose packages may take part in a quantization."""
    options = recipe.options
    named = [options.quantizers, *(method.quantizers for method in options.methods.values())]
    parts = (part.specification for part in recipe.parts)
    return {part.backend for part in parts if part.quantization is not Quantization.NONE} | _component_names(named)


def _component_names(lists: Iterable[Sequence[Component] | None]) -> set[str]:
    return {component.name for components in lists for component in components or ()}


@dataclass(frozen=True)
class Plan:
    """The work for one candidate."""

    candidate: job_pb2.Candidate
    recipe: Recipe | None
    """The resolved recipe; None for an uploaded program."""
    stop_after: str
    """The last stage if it is not TO_EXECUTORCH; empty if the outcome is a program."""
    key: str
    """The compilation's key."""
    quantization_key: str
    """The key of the quantization, shared by all compilations that lower its result; empty if the server quantizes nothing."""

    @property
    def done(self) -> tuple[str, ...]:
        """The stages that are done before the server's first stage, in order; a .pt2 is an exported program."""
        stages = tuple(stage.stage for stage in self.candidate.stages_done)
        return stages if "TORCH_EXPORT" in stages else (*stages, "TORCH_EXPORT")


def plan(
    candidate: job_pb2.Candidate,
    recipe: Recipe | None,
    stop_after: str = "",
    operators: Operators | None = None,
    version_of: VersionOf = installed_version,
) -> Plan:
    """Return the plan for a candidate that Submit has accepted.

    Args:
        recipe: the candidate's recipe, resolved by `RecipeCatalog`; None for an uploaded program.
        stop_after: a stage of the recipe; empty for all of them.
        operators: operators that programs may use; a refused model may pass with another list.
        version_of: returns the versions of the packages that compile.
    """
    versions = toolchain_versions(version_of)
    if recipe is None:
        described = {"schema": "etfarm.inspection/2", "program": program_digest(candidate.program), **versions}
        return Plan(candidate, None, "", digests.of_value(described), "")
    draft = Plan(candidate, recipe, "" if stop_after == _LAST else stop_after, "", "")
    last = recipe.stages.index(stop_after) if stop_after in recipe.stages else len(recipe.stages)
    quantizes = "QUANTIZE" in recipe.stages[: last + 1] and "QUANTIZE" not in draft.done
    common = {
        "methods": {name: method.exported_program.digest for name, method in candidate.model.methods.items()},
        "calibration": calibration_of(candidate) if quantizes else {},
        "stages_done": draft.done,
        "operators": (operators or Operators()).digest,
        **versions,
    }
    compilation = {
        "references": {n: m.reference.digest for n, m in candidate.model.methods.items() if m.HasField("reference")},
        "schema": "etfarm.compilation/3",
        "constant_methods": {name: artifact.digest for name, artifact in candidate.model.constant_methods.items()},
        "calls": calls_of(candidate),
        "recipe": digests.of_bytes(candidate.recipe.encode()),
        "strict": recipe.strict,
        "stop_after": draft.stop_after,
        "plugins": plugin_versions(recipe.plugins),
        "packages": _package_versions(_backends(recipe), version_of),
        **common,
    }
    quantization = {
        "schema": "etfarm.quantization/2",
        "recipe": recipe.quantization_json,
        # Stages that plug-ins replace come after it.
        "plugins": plugin_versions([part.name for part in recipe.parts if part.is_plugin]),
        "packages": _package_versions(_quantizing_backends(recipe), version_of),
        **common,
    }
    return Plan(
        candidate, recipe, draft.stop_after, digests.of_value(compilation), digests.of_value(quantization) if quantizes else ""
    )


def calls_of(candidate: job_pb2.Candidate) -> list[list[str]]:
    """Return the calls that the program is compared by: the method and the digest of its inputs, empty for the example inputs."""
    return [[call.method, call.inputs.digest] for call in candidate.model.calls]


def original_of(method: job_pb2.MethodSource) -> common_pb2.Artifact:
    """Return the .pt2 that outputs are compared with: the unquantized program if the client has sent it."""
    return method.reference if method.HasField("reference") else method.exported_program


def calibration_of(candidate: job_pb2.Candidate) -> dict[str, list[str]]:
    """Return the digests of the calibration samples by method, in order; methods without samples are left out."""
    return {
        name: [artifact.digest for artifact in method.calibration]
        for name, method in candidate.model.methods.items()
        if method.calibration
    }


def plugin_versions(names: Sequence[str]) -> dict[str, str]:
    """Return plug-ins' distributions by plug-in, like `acme-stages 1.2`; plug-ins that are not installed are left out."""
    versions: dict[str, str] = {}
    if names:
        for group in PLUGIN_GROUPS:
            for entry in entry_points(group=group):
                if entry.name in names and entry.dist is not None:
                    versions[f"{group}:{entry.name}"] = f"{entry.dist.name} {entry.dist.version}"
    return versions


def program_digest(program: compile_pb2.Program) -> str:
    """Return a program's digest, computed from its manifest."""
    data: Mapping[str, str] = {name: artifact.digest for name, artifact in program.data.items()}
    return digests.of_program(program.pte.digest, data)
