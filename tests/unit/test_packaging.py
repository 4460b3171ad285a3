"""How the distribution is cut: namespace portions, types, and what importing the wire costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTIONS = {
    "proto/etfarm": ["v1", "wire"],
    "server/etfarm": ["server"],
    "client/etfarm": ["client"],
    "device_agents/etfarm": ["device_agents"],
}


@pytest.mark.parametrize("portion", PORTIONS)
def test_no_portion_claims_the_namespace(portion: str) -> None:
    """One `__init__.py` there would hide all other portions."""
    assert (ROOT / portion).is_dir()
    assert not (ROOT / portion / "__init__.py").exists()


@pytest.mark.parametrize(("portion", "package"), [(portion, name) for portion, names in PORTIONS.items() for name in names])
def test_every_package_says_that_it_is_typed(portion: str, package: str) -> None:
    assert (ROOT / portion / package / "py.typed").exists()


def test_the_portions_hold_the_packages_that_are_listed_here() -> None:
    for portion, names in PORTIONS.items():
        result = {path.name for path in (ROOT / portion).iterdir() if path.is_dir() and path.name != "__pycache__"}
        assert result == set(names)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.split()
    )


def test_importing_the_wire_loads_neither_numpy_nor_grpc() -> None:
    loaded = loaded_by("import etfarm.wire, etfarm.wire.errors, etfarm.wire.names, etfarm.wire.digest, etfarm.wire.command")
    assert "etfarm" in loaded
    assert not loaded & {"numpy", "ml_dtypes", "grpc", "google", "torch"}


def test_what_the_wire_knows_of_tensors_selectors_and_reports_needs_no_numpy() -> None:
    loaded = loaded_by(
        "import etfarm.wire.tensors, etfarm.wire.selectors, etfarm.wire.report, etfarm.wire.recipes, etfarm.wire.status, "
        "etfarm.wire.channel, etfarm.wire.chunks"
    )
    assert "grpc" in loaded
    assert not loaded & {"numpy", "ml_dtypes", "torch"}
