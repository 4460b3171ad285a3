"""Networks that need no other library: etfarm and plain ExecuTorch lower them alike, to the same outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.farm import FarmProcess
from tests.zoo.catalog import networks
from tests.zoo.comparison import Plain, is_close, run_both

pytestmark = pytest.mark.slow(reason="compiles each network twice, once in a process of its own")

STATIC = "xnnpack_pt2e_int8_static_per_channel"


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("executorch/add_mul", "xnnpack_fp32"),
        ("executorch/lstm", "xnnpack_fp32"),
        ("executorch/torch_gru", "portable"),
        ("executorch/deep_autoencoder", STATIC),
    ],
)
def test_a_network_gives_what_plain_executorch_gives(farm: FarmProcess, tmp_path: Path, name: str, recipe: str) -> None:
    with farm.client() as client, Plain(tmp_path) as plain:
        row = run_both(client, plain, name, recipe)
    assert row["etfarm"]["ok"] and row["plain"]["ok"], row
    assert is_close(row["compared"]), row


def test_every_network_has_a_name_of_its_own_and_there_are_many() -> None:
    names = list(networks())
    assert len(names) >= 60 and len({name.partition("/")[0] for name in names}) == 5
