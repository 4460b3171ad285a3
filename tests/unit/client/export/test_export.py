"""Exporting eager models: equal bytes everywhere, the user's own lines, and a sentence for each refusal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from etfarm.client.export import ExportedMethod, FileFactory, ModelSource, export_source, load_source
from etfarm.client.export import errors as e
from etfarm.client.export.eager import archive_of
from etfarm.client.export.samples import ordered_like
from etfarm.client.export.traces import place_in, relative
from etfarm.wire.errors import EtfarmError
from etfarm.wire.tensors import Scalar, decode, to_array
from etfarm.wire.tensors import Tensor as WireTensor
from tests.support.exports import Function, read_program
from tests.support.golden import Golden
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[4]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        y = self.norm(y)
        return torch.cond(y.sum() > 0, self.left, self.right, (y,))

    def left(self, y):
        return y + 1

    def right(self, y):
        return y * 2

def make():
    return Net().eval(), (torch.randn(1, 3, 8, 8),)
"""


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


def forward_of(source: ModelSource) -> ExportedMethod:
    return export_source(source, name="m", folder_base=ROOT).methods["forward"]


def refused(source: ModelSource) -> EtfarmError:
    with pytest.raises(EtfarmError) as caught:
        forward_of(source)
    assert caught.value.stage == "TORCH_EXPORT"
    return caught.value


def traces(pt2: bytes) -> list[str]:
    graphs = [module for module in read_program(pt2).graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [node.meta["stack_trace"] for graph in graphs for node in graph.graph.nodes if node.meta.get("stack_trace")]


def test_an_archive_names_the_users_lines_and_nothing_else_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    source = load_source(FileFactory(Path("models/net.py"), "make"))
    pt2 = export_source(source, name="net").methods["forward"].pt2
    files = set(re.findall(r'File "([^"]+)"', "\n".join(traces(pt2))))
    assert "models/net.py" in files and "torch/nn/modules/conv.py" in files
    assert not [file for file in files if file.startswith(("/", "..")) or re.search(r">\.\d", file)]
    assert any("y = self.norm(y)" in trace for trace in traces(pt2))
    branches = [trace for trace in traces(pt2) if "in forward\n    add = " in trace]  # torch keeps no lines of left itself
    assert branches and all('File "models/net.py", line 14, in forward' in trace for trace in branches)
    with zipfile.ZipFile(io.BytesIO(pt2)) as archive:
        for entry in archive.namelist():
            for private in (str(tmp_path), sys.prefix, str(ROOT), str(Path.home()) + "/"):
                assert private.encode() not in archive.read(entry), entry
    stacks = [node.meta.get("nn_module_stack") for node in read_program(pt2).graph.nodes]
    assert any(stack and "conv" in str(stack) for stack in stacks)


@pytest.mark.slow(reason="exports in several processes, which load torch")
def test_equal_models_give_equal_bytes_in_every_process_and_folder(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from etfarm.client.export import *; from etfarm.wire import digest\n"
        "source = load_source(FileFactory(Path('models/net.py'), 'make'))\n"
        "for _ in range(2): print(digest.of_bytes(export_source(source, name='net').methods['forward'].pt2))"
    )
    digests = set()
    for folder, hash_seed in (("one", "1"), ("two", "2")):
        (tmp_path / folder / "models").mkdir(parents=True)
        (tmp_path / folder / "models" / "net.py").write_text(NET)
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / folder, env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        digests.update(run.stdout.split())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/ada/nets/models/net.py", "models/net.py"),
        ("/home/ada/nets/.venv/lib/python3.11/site-packages/timm/models/vit.py", "timm/models/vit.py"),
        ("/usr/lib/python3/dist-packages/torch/nn/a.py", "torch/nn/a.py"),
        ("C:\\Users\\ada\\venv\\Lib\\site-packages\\torch\\a.py", "torch/a.py"),
        (str(ROOT / "client/etfarm/client/export/demos.py"), "etfarm/client/export/demos.py"),
        (os.__file__, "os.py"),
        ("/home/ada/other/net.py", "net.py"),
        ("../other/net.py", "net.py"),
        ("<string>", "<string>"),
        ("<eval_with_key>.7", "<eval_with_key>"),
    ],
)
def test_a_path_leaves_the_client_without_its_folders(path: str, shown: str) -> None:
    assert relative(path, Path("/home/ada/nets")) == shown


def test_inputs_are_flattened_and_named_and_keep_their_memory_format() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor, opts: Any = None, scale: float = 1.0, **more: Tensor) -> dict[str, Any]:
            return {"sum": x * scale + rest[0], "pair": (more["z"] * 2, opts["mask"] + 1)}

    x = torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last)
    kwargs = {"opts": {"mask": torch.ones(4, dtype=torch.int64)[::2], "none": None}, "scale": 3.0, "z": torch.ones(2).bfloat16()}
    sample = x + 1
    method = forward_of(ModelSource.of(Many().eval(), (x, x), example_kwargs=kwargs, calibration_inputs=[(sample, sample)]))
    assert method.input_names == ("x", "rest_0", "opts_mask", "opts_none", "scale", "z")
    assert len(method.output_names) == 3
    values = decode(method.calibration[0])
    assert [value.name for value in values] == list(method.input_names)
    first, mask, z = (value for value in (values[0], values[2], values[5]) if isinstance(value, WireTensor))
    assert first.dim_order == (0, 2, 3, 1) and to_array(first).tolist() == sample.tolist()
    assert to_array(mask).tolist() == [1, 1]
    assert z.dtype == "bfloat16"
    assert values[3:5] == [Scalar("opts_none", None), Scalar("scale", 3.0)]


def test_one_tensor_for_two_arguments_still_gives_a_program_of_two() -> None:
    x = torch.ones(2)
    method = forward_of(ModelSource.of(Add().eval(), (x, x)))
    module = read_program(method.pt2).module()
    assert module(torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0])).tolist() == [7, 7]


def test_calibration_inputs_travel_in_order_beside_the_example_that_is_in_the_archive() -> None:
    samples = [(torch.full((2,), float(i)), torch.zeros(2)) for i in range(3)]
    method = forward_of(ModelSource.of(Add().eval(), samples[0], calibration_inputs=samples))
    firsts = [decode(file)[0] for file in method.calibration]
    assert [to_array(value)[0] for value in firsts if isinstance(value, WireTensor)] == [1, 2]
    assert forward_of(ModelSource.of(Add().eval(), samples[0])).calibration == ()


def test_every_method_is_exported_and_constants_come_along() -> None:
    source = ModelSource(
        methods={"encode": nn.ReLU().eval(), "decode": Add().eval()},
        example_inputs={"encode": (torch.ones(2),), "decode": (torch.ones(2), torch.ones(2))},
        constant_methods={"vocabulary_size": 32, "table": torch.ones(2), "range": (0.5, 2)},
    )
    model = export_source(source, name="two")
    assert list(model.methods) == ["encode", "decode"] and model.name == "two"
    assert decode(model.constant_methods["vocabulary_size"]) == [Scalar("0", 32)]
    assert decode(model.constant_methods["range"]) == [Scalar("0", 0.5), Scalar("1", 2)]
    assert all(method.duration_ms > 0 for method in model.methods.values())


@pytest.mark.parametrize("value", ["x", None, {"a": 1}, 2**63, [1, None]])
def test_a_constant_that_no_program_can_hold_is_refused(golden: Golden, value: object) -> None:
    source = ModelSource.of(Add().eval(), (torch.ones(1), torch.ones(1)), constant_methods={"name": value})
    with refuses("BAD_MODEL_SOURCE") as refused:
        export_source(source, name="m")
    golden.check(refused.value)


def test_attributes_that_torch_leaves_on_inputs_stay_out_of_archives() -> None:
    x, marked = torch.rand(2, 4), torch.rand(2, 4)
    torch._dynamo.maybe_mark_dynamic(marked, 0)
    left = torch.export.export(nn.Linear(4, 4).eval(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC(max=8)},))
    assert vars(x) and vars(marked), "else this test shows nothing"
    for values in (left, torch.export.export(nn.Linear(4, 4).eval(), (marked,))):
        assert_plain(archive_of(values))
        assert values.example_inputs is not None and vars(values.example_inputs[0][0])


def assert_plain(archive: bytes) -> None:
    """Example inputs are tensors and nothing else."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        (samples,) = (name for name in opened.namelist() if "sample_inputs" in name and name.endswith(".pt"))
        inputs = torch.load(io.BytesIO(opened.read(samples)), weights_only=True)
        assert b"_rebuild_from_type_v2" not in opened.read(samples)
    assert not vars(inputs[0][0])


def test_train_mode_is_refused_wherever_it_hides() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    x = (torch.ones(1, 1, 2, 2),)
    assert refused(ModelSource.of(net, x)).reason == "TRAINING_MODE"
    net.eval()
    net[1].train()
    error = refused(ModelSource.of(net, x))
    assert error.metadata["module"] == "1" and "Call .eval()" in error.remedy
    captured = torch.export.export(net.eval(), x).module()  # its flag says train, and it has no .eval()
    assert forward_of(ModelSource.of(captured, x)).pt2


def test_a_data_dependent_branch_is_reported_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    error = refused(ModelSource.of(Branch().eval(), (torch.ones(3),)))
    assert error.reason == "DATA_DEPENDENT_BRANCH"
    assert re.fullmatch(r"tests/unit/client/export/test_export\.py:\d+", error.metadata["place"])
    assert error.metadata["code"] == "if x.sum() > 0:" and "torch.cond" in error.remedy
    assert capfd.readouterr() == ("", "")


def test_an_assertion_on_values_can_be_left_out_of_programs() -> None:
    class Asserts(nn.Module):
        def __init__(self, in_programs: bool) -> None:
            super().__init__()
            self.in_programs = in_programs

        def forward(self, x: Tensor) -> Tensor:
            if self.in_programs or not torch.compiler.is_exporting():
                assert x.max() < 100, "too large"
            return x * 2

    error = refused(ModelSource.of(Asserts(True).eval(), (torch.ones(3),)))
    assert error.reason == "DATA_DEPENDENT_BRANCH" and "an assertion at" in error.message and "torch.cond" not in error.remedy
    assert "`if not torch.compiler.is_exporting():`" in error.remedy
    module = Asserts(False).eval()
    assert forward_of(ModelSource.of(module, (torch.ones(3),))).pt2
    with pytest.raises(AssertionError, match="too large"):
        module(torch.full((3,), 200.0))


def test_a_program_that_cannot_be_saved_names_what_torch_save_does_not_take() -> None:
    class Constants(nn.Module):
        def __init__(self, outside: bool) -> None:
            super().__init__()
            self.outside = outside

        def forward(self, x: Tensor) -> Tensor:
            one = torch.tensor(1.0)
            branch = (lambda v: v.clone() + one) if self.outside else (lambda v: v.clone() + torch.tensor(1.0))
            return torch.cond(x.sum() > 0, branch, lambda v: v.clone() * 2, (x,))

    error = refused(ModelSource.of(Constants(outside=False).eval(), (torch.ones(3),)))
    assert error.reason == "EXPORT_FAILED" and "torch.export.save failed at " in error.message
    assert re.search(r"test_export.py:\d+ with SerializeError: Failed serializing node cond\.$", error.message)
    assert "create those outside" in error.remedy
    export_source(ModelSource.of(Constants(outside=True).eval(), (torch.ones(3),)), name="m")


class Counter(nn.Module):
    """Counts its calls, in a branch or without gradients."""

    count: Tensor

    def __init__(self, *, in_branch: bool) -> None:
        super().__init__()
        self.in_branch = in_branch
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_branch:
            return torch.cond(x.sum() > 0, lambda v: v + self.count.add_(1), lambda v: v * 2, (x,))
        with torch.no_grad():
            self.count.add_(x.sum())
        return x * 2


def test_a_region_that_only_writes_is_part_of_the_program() -> None:
    program = read_program(forward_of(ModelSource.of(Counter(in_branch=False).eval(), (torch.eye(3),))).pt2)
    module = program.module()
    assert torch.equal(module(torch.eye(3)), torch.eye(3) * 2)
    assert dict(module.named_buffers())["count"].item() == 3
    assert not [node for node in program.graph.nodes if "wrap_with" in str(node.target)]


class Frozen(nn.Module):
    """Computes without gradients: what it returns, what it goes on with, and an input that it returns unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            z = self.stem(x)
        return {"z": z, "x": x, "head": self.head(z), "again": z}


def test_a_region_without_gradients_is_part_of_the_program() -> None:
    model, x = Frozen().eval(), torch.randn(2, 3)
    program = read_program(forward_of(ModelSource.of(model, (x,))).pt2)
    expected, actual = model(x), program.module()(x)
    assert expected.keys() == actual.keys() and all(torch.equal(expected[key], actual[key]) for key in expected)
    lines = [node.meta["stack_trace"] for node in program.graph.nodes if str(node.target) == "aten.linear.default"]
    assert ["self.stem(x)" in line for line in lines] == [True, False]


class Cast(nn.Module):
    """Writes to a buffer in a region whose operators compute in another dtype."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.total.add_(x @ x)
        return x * 2


def test_a_region_of_another_dtype_that_only_writes_is_refused() -> None:
    error = refused(ModelSource.of(Cast().eval(), (torch.eye(3),)))
    assert "torch.autocast" in error.message and "write to buffers after it" in error.remedy


class Tables(nn.Module):
    """Computes in a quantized dtype of PyTorch, or has a weight of one."""

    def __init__(self, *, weight: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.qint8) if weight else None)

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor | None = self.table
        return (torch.quantize_per_tensor(x, 0.1, 0, torch.quint8) if table is None else table).dequantize() + x


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Tables(weight=False),
        lambda: Tables(weight=True),
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}),
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.float16),
        lambda: nn.Sequential(nn.quantized.Quantize(0.1, 0, torch.quint8), nn.quantized.Linear(4, 4), nn.quantized.DeQuantize()),
        lambda: nn.Sequential(torch.ao.nn.quantized.dynamic.LSTM(4, 4)),
    ],
    ids=["dtype", "weight", "dynamic", "float16", "static", "lstm"],
)
def test_models_that_pytorch_quantized_itself_are_to_be_given_in_fp32(make: Callable[[], nn.Module]) -> None:
    error = refused(ModelSource.of(make().eval(), (torch.rand(2, 4),)))
    assert error.remedy.startswith("ExecuTorch has no tensors of PyTorch's quantized dtypes"), error


def lookup() -> nn.Module:
    table = nn.Embedding(16, 32).eval()
    quantize_(table, Int8WeightOnlyConfig(), lambda module, _: isinstance(module, nn.Embedding))
    return table


@pytest.mark.parametrize(
    ("make", "x", "line", "remedy"),
    [
        (
            lambda: Function(lambda x: torch.linalg.lstsq(x, x).solution),
            torch.eye(3),
            "test_export.py:",
            "with other operators",
        ),
        (lambda: Function(lambda x: (x, (x > 0).any().item())), torch.eye(3), "", "return the tensor, without .item()"),
        (lambda: Function(lambda x: nn.functional.one_hot(x)), torch.tensor([0, 2]), "test_export.py:", "such as num_classes of"),
        (lambda: Function(lambda x: torch.cond(x.sum() > 0, lambda v: v + torch.tensor([1.0]), torch.sin, (x,))), torch.eye(3),
         "exports.py:", "create those outside"),
        (lambda: Counter(in_branch=True), torch.eye(3), "test_export.py:", "return the new value of a buffer from each branch"),
        (lambda: Function(lambda x: torch.combinations(x[0])), torch.eye(3), "test_export.py:", "with other operators"),
        (lambda: Function(lambda x: x.to_sparse()), torch.eye(3), "", "compute with dense ones"),
        (lambda: Function(lambda x: torch.view_as_real(torch.view_as_complex(x[:, :2].reshape(3, 1, 2)) * 1j)), torch.eye(3),
         "test_export.py:", "real and imaginary parts separately"),
        (lookup, torch.tensor([1, 2]), "", "leave that layer out with the filter of quantize_"),
    ],
    ids=["shape", "boolean", "number", "constant", "buffer", "size", "sparse", "complex", "torchao"],
)  # fmt: skip
def test_refusals_of_torch_have_a_remedy(make: Callable[[], nn.Module], x: Tensor, line: str, remedy: str) -> None:
    error = refused(ModelSource.of(make().eval(), (x,)))
    assert line in error.message and remedy in error.remedy, error


class Pair(nn.Module):
    """Takes a dict, and a keyword argument."""

    def forward(self, x: dict[str, Tensor], *, scale: Tensor) -> Tensor:
        return x["a"] * scale - x["b"]


def test_keyword_arguments_and_the_order_of_keys() -> None:
    a, b, scale = torch.eye(2), torch.ones(2, 2), torch.tensor(2.0)
    error = refused(ModelSource.of(Pair().eval(), ({"a": a, "b": b},)))
    assert "example_kwargs" in error.remedy
    kwargs = {"scale": scale}
    samples = [({"b": b, "a": a * 3},)]
    source = ModelSource.of(Pair().eval(), ({"a": a, "b": b},), example_kwargs=kwargs, calibration_inputs=samples)
    exported = export_source(source, name="m", calibrate=True).methods["forward"]
    (sample,) = (each if isinstance(each, bytes) else each.read_bytes() for each in exported.calibration)
    first = decode(sample)[0]
    assert isinstance(first, WireTensor) and to_array(first).tolist() == (a * 3).tolist()


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda pairs: defaultdict(list, pairs)])
def test_dicts_of_samples_have_the_order_of_the_example(kind: Callable[[Any], Any]) -> None:
    example = kind([("a", 1), ("b", (2, kind([("c", 3), ("d", 4)])))])
    sample = kind([("b", (5, kind([("d", 6), ("c", 7)]))), ("a", 8)])
    ordered = ordered_like((example,), (sample,))[0]
    assert (ordered["a"], ordered["b"][0], dict(ordered["b"][1])) == (8, 5, {"c": 7, "d": 6}) and type(ordered) is type(sample)
    if type(sample) is not defaultdict:
        assert list(ordered) == ["a", "b"] and list(ordered["b"][1]) == ["c", "d"]


def test_a_boolean_that_depends_on_values_is_returned_as_a_tensor() -> None:
    assert forward_of(ModelSource.of(Function(lambda x: (x, (x > 0).any())).eval(), (torch.eye(3),))).pt2


def test_a_sentence_that_ends_in_a_colon_is_completed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda v: self.n.add_(v) * 1, lambda v: v.clone(), (x,))

    error = refused(ModelSource.of(Writes().eval(), (torch.ones(3),)))
    assert error.reason == "EXPORT_FAILED" and not error.message.rstrip().endswith(":")


def test_any_other_refusal_has_its_first_line_and_the_users() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(3)

    error = refused(ModelSource.of(Wrong().eval(), (torch.ones(8),)))
    assert error.reason == "EXPORT_FAILED" and "shape '[3]' is invalid for input of size 8" in error.message
    assert "test_export.py:" in error.message and error.__cause__ is not None
    assert refused(ModelSource.of(Add().eval(), (torch.ones(8),))).reason == "EXPORT_FAILED"  # an argument too few


def test_dynamic_shapes_are_kept_and_a_left_out_argument_is_static() -> None:
    inputs = (torch.ones(4, 2), torch.ones(2))
    pt2 = forward_of(ModelSource.of(Add().eval(), inputs, dynamic_shapes={"x": {0: Dim("n", max=64)}})).pt2
    module = read_program(pt2).module()
    assert module(torch.ones(9, 2), torch.ones(2)).shape == (9, 2)


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: Dim("n")}, "y": {0: Dim("n")}},
        ({0: Dim("n")}, {0: Dim("n")}),
        {"x": {0: Dim.DYNAMIC}, "y": {0: Dim.DYNAMIC}},
        {"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}},
        {"x": (2 * Dim("n"), None), "y": (2 * Dim("n"), None)},
    ],
)
def test_a_dim_without_a_maximum_is_refused(shapes: object) -> None:
    error = refused(ModelSource.of(Add().eval(), (torch.ones(4, 2), torch.ones(4, 2)), dynamic_shapes=shapes))
    assert error.reason == "DIM_WITHOUT_MAXIMUM"
    assert (error.metadata["argument"], error.metadata["method"]) == ("x", "forward")
    assert error.metadata["dim"] in ("n", "0")


@pytest.mark.parametrize("shapes", [{"forward": {"x": {0: Dim("n", max=9)}}}, {"z": None}, ({0: Dim("n", max=9)},)])
def test_dynamic_shapes_in_another_form_are_refused(shapes: object) -> None:
    error = refused(ModelSource.of(Add().eval(), (torch.ones(4, 2), torch.ones(4, 2)), dynamic_shapes=shapes))
    assert error.reason == "DYNAMIC_SHAPES_FORM" and "x, y" in error.message


def test_dims_that_must_be_equal_are_reported_as_such() -> None:
    shapes = {"x": {0: Dim("a", max=9)}, "y": {0: Dim("b", max=9)}}
    error = refused(ModelSource.of(Add().eval(), (torch.ones(4, 2), torch.ones(4, 2)), dynamic_shapes=shapes))
    assert error.reason == "DIM_SPECIALIZED" and "must always be equal" in error.message
    assert "b = a" in error.remedy


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, -1, 2)[:, 0] + torch.ones(4, 2)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("dim", "shown"), [(Dim("n", max=9), "Dim n"), (Dim.DYNAMIC(max=9), "dim 0 of 'x'")])
def test_an_example_size_of_1_of_a_dynamic_dim_is_reported_with_a_remedy(dim: object, shown: str, strict: bool) -> None:
    source = ModelSource.of(nn.ReLU().eval(), (torch.ones(1, 2),), dynamic_shapes=({0: dim},))
    with pytest.raises(e.DimSpecialized) as caught:
        export_source(source, name="m", strict=strict)
    shown = shown.replace("'x'", "'input'")
    assert f"{shown} cannot be dynamic" in caught.value.message and "example inputs is 1" in caught.value.message
    assert "size there is 2 or more" in caught.value.remedy and "\n" not in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("dim", "shown"), [(Dim("n", max=9), "Dim n"), (Dim.DYNAMIC(max=9), "dim 0 of 'x'")])
def test_a_dim_that_the_model_fixes_is_reported_with_its_size(dim: object, shown: str, strict: bool) -> None:
    source = ModelSource.of(Fixed().eval(), (torch.ones(4, 2),), dynamic_shapes={"x": {0: dim}})
    with pytest.raises(e.DimSpecialized) as caught:
        export_source(source, name="m", strict=strict)
    assert shown in caught.value.message and "the size 4 only" in caught.value.message
    assert "mark_dynamic" not in str(caught.value) and "leave the dim out of dynamic_shapes" in caught.value.remedy


@pytest.mark.remedy("DIM_SPECIALIZED")
def test_a_dim_whose_range_is_too_wide_is_reported_with_the_range_that_fits() -> None:
    class Bounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.shape[0] > 3 else x

    error = refused(ModelSource.of(Bounded().eval(), (torch.ones(4, 2),), dynamic_shapes={"x": {0: Dim("n", max=16)}}))
    assert error.reason == "DIM_SPECIALIZED" and "Write n = Dim('n', min=4, max=16)" in error.remedy
    narrow = refused(ModelSource.of(Bounded().eval(), (torch.ones(4, 2),), dynamic_shapes={"x": {0: Dim.DYNAMIC(max=3)}}))
    assert narrow.reason == "DIM_SPECIALIZED" and "range of [4, int_oo]" in narrow.message
    fitting = {"x": {0: Dim("n", min=4, max=16)}}
    assert export_source(ModelSource.of(Bounded().eval(), (torch.ones(4, 2),), dynamic_shapes=fitting), name="m")


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), "complex64.*view_as_real"),
        ("text", "a str"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_inputs_that_no_device_can_be_given_are_refused(leaf: object, words: str) -> None:
    class Ignore(nn.Module):
        def forward(self, x: Tensor, extra: Any) -> Tensor:
            return x + 1

    error = refused(ModelSource.of(Ignore().eval(), (torch.ones(2), leaf)))
    assert error.reason == "UNSUPPORTED_INPUT"
    assert re.search(words, str(error)), str(error)


def test_weights_without_values_are_refused() -> None:
    error = refused(ModelSource.of(nn.Linear(2, 2, device="meta").eval(), (torch.ones(1, 2),)))
    assert error.reason == "MODEL_NOT_ON_CPU" and error.metadata["tensor"] == "weight"


@pytest.mark.remedy("CALIBRATION_MISMATCH")
@pytest.mark.parametrize(
    "sample", [(torch.ones(2),), (torch.ones(2, 2), torch.ones(2)), (torch.ones(2).half(), torch.ones(2)), (torch.ones(2), 3)]
)
def test_a_calibration_sample_unlike_the_example_is_refused(sample: tuple[Any, ...]) -> None:
    example = (torch.ones(2), torch.ones(2))
    error = refused(ModelSource.of(Add().eval(), example, calibration_inputs=[example, sample]))
    assert error.reason == "CALIBRATION_MISMATCH" and error.metadata["sample"] == "1"
    assert export_source(ModelSource.of(Add().eval(), example, calibration_inputs=[example, example]), name="m")


def test_the_place_in_a_message_is_the_users_innermost_line() -> None:
    text = 'failed\n  File "/w/net.py", line 3, in forward\n    y = f(x)\n'
    text += '  File "/v/site-packages/torch/a.py", line 9, in g\n    z\n'
    place = place_in(text, Path("/w"))
    assert place is not None and (str(place), place.code) == ("net.py:3", "y = f(x)")
    assert place_in("no frames here", Path("/w")) is None


def test_the_users_own_line_goes_before_a_librarys_that_it_calls() -> None:
    library = '  File "/v/site-packages/timm/vit.py", line 9, in forward\n    z\n'
    text = f'failed\n  File "/w/net.py", line 3, in forward\n    y = self.vit(x)\n{library}'
    assert str(place_in(text, Path("/w"))) == "net.py:3"
    assert str(place_in(f"failed\n{library}", Path("/w"))) == "timm/vit.py:9"
