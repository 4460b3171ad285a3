"""The list of operators: made by its generator, wide enough for common networks, and added to by who may."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.compile.screening import operators
from etfarm.server.compile.screening.errors import OperatorNotAllowed, UnsafeModel
from etfarm.server.compile.screening.expressions import check_target
from etfarm.server.compile.screening.operators import Added, Operators
from etfarm.server.compile.screening.screen import screen_pt2
from tests.support.golden import Golden
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[5]
SEEN = Path(__file__).parents[4] / "support" / "operators_seen.txt"
"""Operators of the networks that tests/bench/networks.py exports, before and after run_decompositions()."""

DANGEROUS = (
    "aten._reshape_alias.default", "aten._sparse_coo_tensor_unsafe.default", "aten.ctc_loss.Tensor", "aten.data.default",
    "aten.from_file.default", "aten.from_file.out", "aten.record_stream.default", "aten.resize_.default", "aten.save.default",
    "aten.set_.source_Tensor", "aten.set_data.default", "aten.to_mkldnn.default", "higher_order.call_torchbind",
    "higher_order.print", "prim.rpc_sync.default", "prims.inductor_seeds.default", "prims.resize.default",
    "aten._embedding_bag_dense_backward.default", "aten.embedding_dense_backward.default", "aten.copy_sparse_to_sparse.default",
)  # fmt: skip


def listed() -> list[str]:
    return [line for line in operators.LIST.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.slow(reason="asks the whole toolchain")
def test_the_list_is_what_its_generator_gives_for_the_installed_toolchain() -> None:
    pytest.importorskip("executorch")
    done = subprocess.run(
        [sys.executable, str(ROOT / "server" / "generate_operators.py"), "--check"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_list_is_sorted_and_has_each_operator_once() -> None:
    assert listed() == sorted(set(listed()))
    assert len(operators.builtin()) == len(listed())


def test_every_operator_of_common_networks_is_on_the_list() -> None:
    seen = [line for line in SEEN.read_text().splitlines() if not line.startswith("#")]
    assert len(seen) > 150
    assert sorted(set(seen) - set(listed())) == []


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_reaches_files_memory_or_the_process_is_not_on_the_list(name: str) -> None:
    assert name not in listed()
    with pytest.raises(OperatorNotAllowed):
        check_target(f"torch.ops.{name}", "here")


@pytest.mark.parametrize("arguments", [[{"as_int": 50}], [{"as_scalar_type": 5, "as_int": 50}], [None], None])
def test_promoted_types_are_dtypes(tmp_path: Path, arguments: Any) -> None:
    torch = pytest.importorskip("torch")

    class Sizes(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tensor([x.shape[0], x.shape[1]]), x.to(torch.result_type(x, torch.ones(1)))

    dims = {"x": {0: torch.export.Dim("n", min=2, max=9), 1: torch.export.Dim("k", min=2, max=9)}}
    torch.export.save(torch.export.export(Sizes(), (torch.ones(3, 4),), dynamic_shapes=dims), tmp_path / "good.pt2")
    screen_pt2(tmp_path / "good.pt2")

    with zipfile.ZipFile(tmp_path / "good.pt2") as good, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as bad:
        for name in good.namelist():
            data = good.read(name)
            if name.endswith("models/model.json"):
                program = json.loads(data)
                nodes = program["graph_module"]["graph"]["nodes"]
                node = next(each for each in nodes if each["target"] == "torch.ops.aten.promote_types.default")
                first, second = node["inputs"]
                node["inputs"] = arguments and [{**first, "arg": arguments[0]}, second]
                data = json.dumps(program).encode()
            bad.writestr(name, data)
    with pytest.raises(UnsafeModel, match="promotes a number that is not a dtype"):
        screen_pt2(tmp_path / "bad.pt2")


def test_a_server_without_torch_reads_the_list() -> None:
    code = "import sys; from etfarm.server.compile.screening import operators as o; o.read(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_owner_adds_operators_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "operators"
    file.write_text("# ours\n\nmine.blur.default  # reviewed\nhigher_order.wrap\n")
    allowed = operators.read([file])
    assert {"torch.ops.mine.blur.default", "torch.ops.higher_order.wrap", "torch.ops.aten.add.Tensor"} <= allowed.targets
    check_target("torch.ops.mine.blur.default", "here", allowed.targets)
    assert allowed.digest != Operators().digest


@pytest.mark.remedy("BAD_OPERATORS")
@pytest.mark.parametrize(
    "line", ["torch.load", "torch.hub.load", "_operator.attrgetter.x", "mine::blur", "mine.blur", "mine.blur.default()",
             "a.b.__class__"]
)  # fmt: skip
def test_a_line_that_names_no_operator_is_refused(golden: Golden, tmp_path: Path, line: str) -> None:
    (tmp_path / "operators").write_text(line)
    with refuses("BAD_OPERATORS") as caught:
        operators.read([tmp_path / "operators"])
    golden.check(caught.value)
    assert caught.value.remedy.startswith("Name it like aten.add.Tensor")
    (tmp_path / "operators").write_text("# the model's\naten.add.Tensor\n")
    operators.read([tmp_path / "operators"])


@pytest.mark.parametrize("data", [None, b"\xff\xfe", b"x" * (operators.MAX_LIST_BYTES + 1)])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "operators"
    if data is not None:
        file.write_bytes(data)
    with refuses("BAD_OPERATORS"):
        operators.read([file])


def plugin(folder: Path, name: str) -> Distribution:
    """Return an installed distribution that allows an operator, and the module that registers it."""
    info = folder / "acme_ops-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ops\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{operators.PLUGINS}]\n{name} = acme_ops\n")
    return PathDistribution(info)


def test_a_plugin_allows_its_operators_and_is_imported_only_where_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path, "acme.blur.default")
    monkeypatch.syspath_prepend(str(tmp_path))
    allowed = operators.read()
    assert Added("acme.blur.default", "acme_ops", "acme-ops 1.2") in allowed.added
    assert "torch.ops.acme.blur.default" in allowed.targets
    assert allowed.modules(b'{"target": "torch.ops.acme.blur.default"}') == ["acme_ops"]
    assert allowed.modules(b'{"target": "torch.ops.aten.add.Tensor"}') == []
    assert "acme_ops" not in sys.modules


def test_a_plugin_whose_entry_point_is_no_operator_is_refused_at_the_start(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path, "torch.load")
    monkeypatch.syspath_prepend(str(tmp_path))
    with refuses("BAD_OPERATORS") as refused:
        operators.read()
    golden.check(refused.value)
