"""The screen: what torch.export.save writes passes, each known way to execute code is refused without torch."""

from __future__ import annotations

import ast
import io
import json
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.server.compile.screening import archives, payloads, pickles, screen
from etfarm.server.compile.screening.errors import NotAPt2, UnsafeModel
from etfarm.wire.errors import UserError
from tests.support.refusals import refuses

torch = pytest.importorskip("torch")

from tests.support import models  # noqa: E402 - needs torch
from tests.support.golden import Golden  # noqa: E402

Members = dict[str, bytes]
MODEL = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """The members of a real .pt2, with dynamic shapes and a guard."""
    path = models.save(models.dynamic, tmp_path_factory.mktemp("screen") / "m")
    with zipfile.ZipFile(path) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


def write(path: Path, members: Members, root: str = "archive/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(root + name, data)
    return path


def refused(path: Path, members: Members) -> str:
    """Return the vector that `members` are refused for."""
    with pytest.raises(UnsafeModel) as caught:
        screen.screen_pt2(write(path, members))
    assert caught.value.reason == "UNSAFE_MODEL"
    return caught.value.metadata["vector"]


def changed(members: Members, change: Callable[[Any], None], name: str = MODEL) -> Members:
    document = json.loads(members[name])
    change(document)
    return members | {name: json.dumps(document).encode()}


class Exploit:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return __import__("os").system, ("touch /tmp/etfarm-was-exploited",)


def torch_saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        models.conv,
        models.fft,
        models.dict_inputs,
        models.dynamic,
        models.marked_dynamic,
        models.counter,
        models.unknown,
        models.elementwise,
    ],
)
def test_what_torch_writes_passes(make: Callable[[], Any], tmp_path: Path) -> None:
    assert screen.screen_pt2(models.save(make, tmp_path / "digest-without-suffix")) is None  # type: ignore[func-returns-value]


def test_what_torch_writes_after_lowering_to_core_operators_passes(tmp_path: Path) -> None:
    path = models.save(lambda: models.dynamic().run_decompositions(), tmp_path / "m")
    assert screen.screen_pt2(path) is None  # type: ignore[func-returns-value]


def test_the_screen_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, etfarm.server.compile.screening.screen; sys.exit(bool({'torch', 'numpy', 'sympy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "samples",
    [
        torch_saved(((Exploit(),), {})),
        pickle.dumps(((Exploit(),), {})),  # no zip: torch's older format
        torch_saved(((torch.ones(1),), {})) + b"x",
        torch_saved(((complex,), {})),
    ],
    ids=["call", "bare pickle", "appended", "class"],
)
def test_sample_inputs_that_need_a_full_unpickle_are_refused(good: Members, tmp_path: Path, samples: bytes) -> None:
    assert refused(tmp_path / "m", good | {SAMPLES: samples}) == "NOT_WEIGHTS_ONLY"


class Attributes:
    """A tensor with attributes, as torch pickles it."""

    def __init__(self, state: object, kind: Any = torch.Tensor, create: Any = torch._utils._rebuild_tensor_v2) -> None:
        self.state, self.kind, self.create = state, kind, create

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        arguments: Any = (torch.ones(3).untyped_storage(), 0, (3,), (1,), False, OrderedDict())
        return torch._tensor._rebuild_from_type_v2, (self.create, self.kind, arguments, self.state)


@pytest.mark.parametrize("dimensions", [{0: []}, {0: [], 1: []}, {}], ids=str)
def test_tensors_with_marked_dimensions_pass(good: Members, tmp_path: Path, dimensions: dict[int, list[object]]) -> None:
    tensors = [Attributes({"_specialize_on": dimensions}), Attributes({"_specialize_on": {1: []}}), torch.ones(2)]
    members = good | {SAMPLES: torch_saved(((tensors[0],), {"x": tensors[1:]}))}
    assert screen.screen_pt2(write(tmp_path / "m", members)) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    "value",
    [
        Attributes({"data": torch.ones(1)}),
        Attributes({"_specialize_on": {0: []}, "grad": None}),
        Attributes({"_specialize_on": {0: [torch.Size]}}),
        Attributes({"_specialize_on": {"x": []}}),
        Attributes({"_specialize_on": []}),
        Attributes(({}, {"_specialize_on": {0: []}})),
        Attributes({"_specialize_on": {0: []}}, torch.nn.Parameter),
        Attributes({"_specialize_on": {0: []}}, create=torch.Size),
        Attributes({"_specialize_on": {0: []}}, create=torch.Tensor),
        [Attributes({"_specialize_on": {0: []}}), torch.Tensor],
        torch.Tensor,
        torch._tensor._rebuild_from_type_v2,
    ],
)
def test_tensors_with_other_attributes_are_refused(good: Members, tmp_path: Path, value: object) -> None:
    assert refused(tmp_path / "m", good | {SAMPLES: torch_saved(((value,), {}))}) == "NOT_WEIGHTS_ONLY"


def test_attributes_that_change_after_the_tensor_has_them_are_refused() -> None:
    functions = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n"
    call = functions + b")}X\x0e\0\0\0_specialize_on}K\0]"
    pickles.check(b"\x80\x02" + call + b"sstR.", "x")
    with pytest.raises(UnsafeModel):
        pickles.check(b"\x80\x02" + call + b"q\x01sstRh\x01K\x07a.", "x")


def test_sample_inputs_as_a_torchscript_archive_are_refused(good: Members, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(good[SAMPLES])) as archive:
        inner = {i.filename.partition("/")[2]: archive.read(i) for i in archive.infolist()}
    samples = write(tmp_path / "s", inner | {"constants.pkl": b""}).read_bytes()
    assert refused(tmp_path / "m", good | {SAMPLES: samples}) == "NOT_WEIGHTS_ONLY"


@pytest.mark.parametrize("name", ["opaque_obj_0", "custom_obj_0"])
def test_constants_that_are_objects_are_refused(good: Members, tmp_path: Path, name: str) -> None:
    assert refused(tmp_path / "a", good | {f"data/constants/{name}": pickle.dumps(Exploit())}) == "CODE_CONSTANT"
    config = json.dumps({"config": {"c": {"path_name": name, "use_pickle": False}}}).encode()
    assert refused(tmp_path / "b", good | {"data/constants/model_constants_config.json": config}) == "CODE_CONSTANT"


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickled_tensors_are_refused(good: Members, tmp_path: Path, kind: str) -> None:
    config = json.dumps({"config": {"c": {"path_name": "weight_0", "use_pickle": True}}}).encode()
    name = f"data/{kind}/model_{kind}_config.json"
    assert refused(tmp_path / "m", good | {name: config}) == "PICKLED_WEIGHTS"
    assert refused(tmp_path / "m", good | {f"data/{kind}/model.pt": torch_saved({})}) == "PICKLED_WEIGHTS"


def test_native_code_and_unknown_members_are_refused(good: Members, tmp_path: Path) -> None:
    for name in ("data/aotinductor/model/model.so", "data/other/x", "executorch/x", "models/model.py", "x.py"):
        assert refused(tmp_path / "m", good | {name: b"\x7fELF"}) == "UNKNOWN_MEMBER"


def test_the_older_layout_of_an_archive_is_refused(tmp_path: Path) -> None:
    older = {"version": b"8.1", "serialized_exported_program.json": b"{}", "serialized_state_dict.pt": b""}
    with pytest.raises(NotAPt2):
        screen.screen_pt2(write(tmp_path / "m", older))


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('id')",
        "Symbol('s1').__class__",
        "Symbol('s1', positive=__import__('os').system('id'))",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "exec('x')",
        "Float('1', precision=Symbol('x'))",
        "Integer('1')",
        "Pow(Integer(9), Integer(99999999))",
        "Add(" * 100 + ")" * 100,
        "1" * 30000,
        "s1; import os",
        "Symbol('a b')",
        "f'{1}'",
    ],
)
def test_an_expression_that_sympify_would_evaluate_is_refused(good: Members, tmp_path: Path, expression: str) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": expression}}

    assert refused(tmp_path / "m", changed(good, change)) == "UNSAFE_EXPRESSION"


def test_an_expression_hides_nowhere(good: Members, tmp_path: Path) -> None:
    evil = {"as_expr": {"expr_str": "__import__('os').system('id')"}}

    def in_metadata(program: Any) -> None:
        program["graph_module"]["graph"]["tensor_values"]["metadata"] = {"sizes": [evil]}

    def in_weights(config: Any) -> None:
        next(iter(config["config"].values()))["tensor_meta"]["sizes"] = [evil]

    weights = "data/weights/model_weights_config.json"
    assert refused(tmp_path / "a", changed(good, in_metadata)) == "UNSAFE_EXPRESSION"
    assert refused(tmp_path / "b", changed(good, in_weights, weights)) == "UNSAFE_EXPRESSION"


@pytest.mark.parametrize(
    "guard",
    [
        "__import__('os').system('id')",
        "L['x'].size.__globals__",
        "L['x'].size()[0] <= 8 or exec('x')",
        "L['x'].tolist()",
        "(y := 1) == 1",
        "L['\"); import os; (\"'] == 1",
        "print(1)",
    ],
)
def test_a_guard_that_torch_would_execute_is_refused(good: Members, tmp_path: Path, guard: str) -> None:
    assert refused(tmp_path / "m", changed(good, lambda p: p.update(guards_code=[guard]))) == "UNSAFE_GUARD"


@pytest.mark.parametrize(
    "target",
    ["torch.os.system", "torch.ops.load_library", "torch.ops.load_library.__call__.__call__", "torch.hub.load",
     "_operator.attrgetter", "_operator.methodcaller", "#handler:x", "math.__loader__.load_module",
     "torch.ops.aten.add.__class__", "torch.ops.higher_order.__class__", "torch.ops._operator.add", "aten.add.Tensor",
     "torch.ops.aten", "torch.ops.aten.add", "torch.sym_max.__self__", "math.ceil.__self__"],
)  # fmt: skip
def test_a_target_that_is_no_known_operator_is_refused(good: Members, tmp_path: Path, target: str) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["target"] = target

    assert refused(tmp_path / "m", changed(good, change)) == "UNSAFE_TARGET"


def test_a_custom_operator_is_refused_by_its_name(good: Members, tmp_path: Path) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.mine.blur.default"

    with refuses("UNKNOWN_OPERATOR", match="mine::blur"):
        screen.screen_pt2(write(tmp_path / "m", changed(good, change)))


@pytest.mark.parametrize(
    ("operator", "refused"), [("quant.dequantize_codebook", False), ("quant.choose_qparams_and_quantize_codebook_coreml", True)]
)
def test_of_torchaos_codebooks_only_what_a_program_needs_is_known(
    good: Members, tmp_path: Path, operator: str, refused: bool
) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["target"] = f"torch.ops.{operator}.default"

    path = write(tmp_path / "m", changed(good, change))
    if not refused:
        screen.screen_pt2(path)
        return
    with refuses("UNKNOWN_OPERATOR"):
        screen.screen_pt2(path)


@pytest.mark.parametrize("name", ["x):\n    import os\n    def y(", "a b", "x=1", "x;y", "a'b", "é"])
def test_a_name_that_would_be_source_code_is_refused(good: Members, tmp_path: Path, name: str) -> None:
    def placeholder(program: Any) -> None:
        program["graph_module"]["graph"]["inputs"][0]["as_tensor"]["name"] = name

    def argument(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [name]

    def in_metadata(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = {"metadata": {"as_name": name}}

    for change in (placeholder, argument, in_metadata):
        assert refused(tmp_path / "m", changed(good, change)) == "UNSAFE_NAME"


@pytest.mark.parametrize("name", ["two words", "größe", "検出", "(0, 1)", "<user___buys___item>", "task/1: a+b"])
def test_modules_and_buffers_may_have_names_of_any_text(tmp_path: Path, name: str) -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
            self.heads[name].register_buffer(name, torch.ones(2))

        def forward(self, x: Any) -> Any:
            return self.heads[name](x) + self.heads[name].get_buffer(name)

    network, inputs = Named(), torch.randn(1, 2)
    path = models.save(lambda: torch.export.export(network, (inputs,)), tmp_path / "m.pt2")
    screen.screen_pt2(path)
    assert torch.equal(torch.export.load(path).module()(inputs), network(inputs))


@pytest.mark.parametrize("name", ["it's", 'say "x"', "a\\b", "a`b", "a\nb", "\ufb01", "__class__", "\uff3f_class__"])
def test_a_name_that_would_end_its_quotes_or_become_another_is_refused(good: Members, tmp_path: Path, name: str) -> None:
    def change(program: Any) -> None:
        specs = program["graph_module"]["signature"]["input_specs"]
        next(one["parameter"] for one in specs if "parameter" in one)["parameter_name"] = f"layer.{name}.weight"

    assert refused(tmp_path / "m", changed(good, change)) == "UNSAFE_NAME"


def test_a_dict_key_that_would_break_out_of_a_guards_message_is_refused(good: Members, tmp_path: Path) -> None:
    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["in_spec"])
        spec[1]["children_spec"][1]["context"] = json.dumps(['") or __import__("os").system("id") or ("'])
        signature["in_spec"] = json.dumps(spec)

    assert refused(tmp_path / "m", changed(good, change)) == "UNSAFE_TREE"


def returning(node: Any) -> Callable[[Any], None]:
    """Put a node into the treespec of the program's outputs."""

    def change(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, node])

    return change


def node(context: Any, kind: str = "builtins.dict") -> dict[str, Any]:
    leaf = {"type": None, "context": None, "children_spec": []}
    return {"type": kind, "context": json.dumps(context), "children_spec": [leaf]}


@pytest.mark.parametrize("key", ["é", "it's", '") or exit("', "a/b %\n\x85", 5, True, None, 0.5])
def test_keys_of_outputs_may_be_any_text(good: Members, tmp_path: Path, key: Any) -> None:
    screen.screen_pt2(write(tmp_path / "m", changed(good, returning(node([key])))))


@pytest.mark.parametrize(
    "tree",
    [
        node([{"__enum__": True, "fqn": "this:c", "name": "x"}]),
        node([["a"]]),
        node(["\ud800"]),
        node(["x" * 8001]),
        node({"a": 1}),
        node("a"),
        node([{"__enum__": True, "fqn": "this:c", "name": "x"}], "builtins.tuple"),
        node({"default_factory_module": "this", "default_factory_name": "c", "dict_context": []}, "collections.defaultdict"),
        node("it's", "my.Class"),
        {**node(["a"]), "more": 1},
        {**node(["a"]), "children_spec": {}},
        {**node(["a"]), "context": ["a"]},
        {**node(["a"]), "type": ["a"]},
        "a",
    ],
)
def test_other_keys_and_classes_of_outputs_are_refused(good: Members, tmp_path: Path, tree: Any) -> None:
    assert refused(tmp_path / "m", changed(good, returning(tree))) == "UNSAFE_TREE"


def test_letters_of_any_script_are_keys_of_inputs(good: Members, tmp_path: Path) -> None:
    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["in_spec"])
        spec[1]["children_spec"][1]["context"] = json.dumps(["température", "e\u0301", "入力"])
        signature["in_spec"] = json.dumps(spec)

    screen.screen_pt2(write(tmp_path / "m", changed(good, change)))


def test_script_objects_are_refused(good: Members, tmp_path: Path) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["custom_obj_values"] = {"metadata": {"name": "o", "class_fqn": "c"}}

    assert refused(tmp_path / "m", changed(good, change)) == "CODE_CONSTANT"


def test_an_archive_that_two_readers_see_differently_is_refused(good: Members, tmp_path: Path) -> None:
    path = tmp_path / "m"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in good.items():
            archive.writestr("archive/" + name, data)
    path.write_bytes(packed.getvalue())
    with pytest.raises(UnsafeModel, match="compressed"):
        screen.screen_pt2(path)
    whole = write(path, good).read_bytes()
    for other in (b"MZ" + whole, whole + b"x", write(path, good).read_bytes()[:-2] + b"\x01\x00x"):
        path.write_bytes(other)
        with pytest.raises((NotAPt2, UnsafeModel)):
            screen.screen_pt2(path)
    assert refused(path, good | {MODEL.upper(): good[MODEL]}) == "AMBIGUOUS_ZIP"
    assert refused(path, good | {"../x": b""}) == "AMBIGUOUS_ZIP"


def test_a_zip_bomb_is_refused(golden: Golden, good: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "m", good)
    data = bytearray(path.read_bytes())
    (entry,) = struct.unpack_from("<I", data, len(data) - 6)  # the directory's offset, in the end record
    struct.pack_into("<II", data, entry + 20, 1 << 30, 1 << 30)  # both sizes of the first member
    path.write_bytes(data)
    with pytest.raises(UnsafeModel) as refused:
        screen.screen_pt2(path)
    golden.check(refused.value)


def padded(members: Members, name: str = MODEL) -> Members:
    """With a member that says nothing more, and is more than the daemon looks into."""
    return members | {name: members[name] + b" " * screen.UPLOAD_PARSED_BYTES}


def evil(program: Any) -> None:
    program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.system"


def test_an_upload_of_a_usual_size_is_screened_whole(good: Members, tmp_path: Path) -> None:
    screen.screen_upload(write(tmp_path / "m", good))
    with pytest.raises(UnsafeModel) as caught:
        screen.screen_upload(write(tmp_path / "m", changed(good, evil)))
    assert caught.value.metadata["vector"] == "UNSAFE_TARGET"


def test_a_large_graph_is_left_to_the_child(good: Members, tmp_path: Path) -> None:
    screen.screen_upload(write(tmp_path / "m", padded(changed(good, evil))))
    assert refused(tmp_path / "m", padded(changed(good, evil))) == "UNSAFE_TARGET"
    screen.screen_pt2(write(tmp_path / "m", padded(good)))


def test_what_the_child_does_with_a_large_graph_is_refuse_it_before_torch_loads_it(
    good: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etfarm.server.compile.program import loading

    monkeypatch.setattr(loading, "read_program", lambda _: pytest.fail("torch loads it"))
    with pytest.raises(UnsafeModel):
        loading.load(write(tmp_path / "m", padded(changed(good, evil))), tmp_path)


@pytest.mark.parametrize("name", [MODEL, SAMPLES, "data/weights/model_weights_config.json"])
def test_no_large_member_is_read_by_the_daemon(good: Members, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m", padded(good, name))
    tracemalloc.start()
    try:
        screen.screen_upload(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_small_graphs_are_as_much_as_a_large_one(good: Members, tmp_path: Path) -> None:
    quarter = good[MODEL] + b" " * (screen.UPLOAD_PARSED_BYTES // 4)
    screen.screen_upload(write(tmp_path / "m", changed(good, evil) | {f"models/{n}.json": quarter for n in range(4)}))
    with pytest.raises(UnsafeModel):
        screen.screen_upload(write(tmp_path / "m", changed(good, evil) | {f"models/{n}.json": quarter for n in range(3)}))


def test_the_directory_of_a_large_model_is_checked_all_the_same(good: Members, tmp_path: Path) -> None:
    large = padded(good)
    for member in ("data/aotinductor/model/model.so", "data/constants/custom_obj_0", "data/weights/model.pt"):
        with pytest.raises(UnsafeModel):
            screen.screen_upload(write(tmp_path / "m", large | {member: b""}))
    with pytest.raises(NotAPt2, match="archive_format"):
        screen.screen_upload(write(tmp_path / "m", large | {"archive_format": b"x" * (10 << 20)}))
    with pytest.raises(UnsafeModel, match="twice"):
        screen.screen_upload(write(tmp_path / "m", large | {MODEL.upper(): b""}))


def test_a_directory_is_counted_before_it_is_read(golden: Golden, good: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "m", good)
    data = path.read_bytes()
    length, start = struct.unpack_from("<II", data, len(data) - 10)
    directory = data[start : start + length]
    times = archives.MAX_MEMBERS // directory.count(b"PK\x01\x02") + 1
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, length * times, start, 0)
    path.write_bytes(data[:start] + directory * times + end)
    with pytest.raises(UnsafeModel) as refused:
        screen.screen_upload(path)
    golden.check(refused.value)
    size = archives.MAX_DIRECTORY_BYTES + 1
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, size, start, 0)
    path.write_bytes(data[:start] + bytes(size) + end)
    with pytest.raises(UnsafeModel) as refused:
        screen.screen_upload(path)
    golden.check(refused.value)


@pytest.mark.parametrize("shift", [-1, 1, 1 << 20])
def test_a_directory_that_lies_elsewhere_is_refused(golden: Golden, good: Members, tmp_path: Path, shift: int) -> None:
    path = write(tmp_path / "m", good)
    data = bytearray(path.read_bytes())
    (start,) = struct.unpack_from("<I", data, len(data) - 6)
    struct.pack_into("<I", data, len(data) - 6, start + shift)
    path.write_bytes(data)
    with pytest.raises(NotAPt2) as refused:
        screen.screen_upload(path)
    golden.check(refused.value)


@pytest.mark.parametrize("data", [b"", b"PK", b"not a zip at all", b"\0" * 100])
def test_other_bytes_are_no_pt2(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(NotAPt2) as caught:
        screen.screen_pt2(tmp_path / "m")
    assert caught.value.reason == "NOT_A_PT2"


@pytest.mark.slow(reason="screens thousands of damaged files")
@given(cut=st.floats(0, 0.999))
def test_a_cut_off_pt2_is_refused(good: Members, tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    path = write(tmp_path_factory.getbasetemp() / "cut", good)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises((NotAPt2, UnsafeModel)):
        screen.screen_pt2(path)


@pytest.mark.remedy("EDGE_DIALECT_PROGRAM")
def test_an_edge_dialect_program_is_refused_before_it_is_loaded(golden: Golden, tmp_path: Path) -> None:
    from executorch.exir import EdgeCompileConfig, to_edge
    from executorch.exir.serde.serialize import save

    edge = to_edge(models.elementwise(), compile_config=EdgeCompileConfig(_check_ir_validity=False)).exported_program()
    torch.export.save(edge, str(tmp_path / "edge.pt2"))
    for screened in (screen.screen_pt2, screen.screen_upload):
        with refuses("EDGE_DIALECT_PROGRAM") as caught:
            screened(tmp_path / "edge.pt2")
        assert "is an edge-dialect program" in caught.value.message and "executorch.exir.dialects.edge." in caught.value.message
        assert "Give the ATen-dialect program" in caught.value.remedy
    save(edge, str(tmp_path / "serde.pt2"))
    with pytest.raises(NotAPt2) as refused:
        screen.screen_pt2(tmp_path / "serde.pt2")
    golden.check(refused.value)
    torch.export.save(models.elementwise(), str(tmp_path / "aten.pt2"))
    screen.screen_pt2(tmp_path / "aten.pt2")


def test_numbers_that_json_has_not_and_modules_with_dashes_pass(good: Members, tmp_path: Path) -> None:
    """Paddings of -inf, and torchvision's regnets, whose blocks are called block1-0."""

    def change(program: Any) -> None:
        inputs = program["graph_module"]["graph"]["nodes"][0]["inputs"]
        inputs.append({"name": "value", "arg": {"as_float": "-Infinity"}, "kind": 1})
        inputs.append({"name": "values", "arg": {"as_floats": [1.0, "NaN", "Infinity"]}, "kind": 1})
        specs = program["graph_module"]["signature"]["input_specs"]
        next(spec["parameter"] for spec in specs if "parameter" in spec)["parameter_name"] = "block4-5.f.c.weight"

    assert refusal_reason(write(tmp_path / "m", changed(good, change))) == ""


def test_a_graph_as_utf16_is_no_json(good: Members, tmp_path: Path) -> None:
    """json.loads of bytes would read it; torch would not."""
    with pytest.raises(NotAPt2):
        screen.screen_pt2(write(tmp_path / "m", good | {MODEL: good[MODEL].decode().encode("utf-16")}))


@pytest.mark.parametrize(
    ("sizes", "strides", "offset", "passes"),
    [
        ([2, 3], [3, 1], 0, True),
        ([], [], 0, True),
        ([0, 5], [5, 1], 0, True),
        ([1 << 20, 2], [0, 1], 0, True),  # expanded
        ([24], [1], 0, True),
        ([25], [1], 0, False),
        ([2], [1], 23, False),
        ([1 << 40], [0], 0, False),
        ([1, 1], [1], 0, False),
    ],
)
def test_a_payload_lies_within_its_member(sizes: list[int], strides: list[int], offset: int, passes: bool) -> None:
    meta = {
        "sizes": [{"as_int": one} for one in sizes], "strides": [{"as_int": one} for one in strides],
        "storage_offset": {"as_int": offset},
    }  # fmt: skip
    config = {"config": {"w": {"path_name": "weight_0", "use_pickle": False, "tensor_meta": meta}}}
    check = partial(payloads.check, "data/weights/model_weights_config.json", config, {"data/weights/weight_0": 24})
    if passes:
        check()
        return
    with pytest.raises(UnsafeModel) as caught:
        check()
    assert caught.value.metadata["vector"] == "OUT_OF_BOUNDS"


SCREENING_REASONS = frozenset(
    {"", "NOT_A_PT2", "PT2_OF_ANOTHER_TORCH", "UNSAFE_MODEL", "UNKNOWN_OPERATOR", "EDGE_DIALECT_PROGRAM"}
)


def refusal_reason(path: Path) -> str:
    """Return the reason for which the screen refuses a file; empty if the file passes."""
    try:
        screen.screen_pt2(path)
    except UserError as error:
        return error.reason
    return ""


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=30)
    | st.sampled_from(["torch.ops.aten.add.Tensor", "torch.ops.aten.from_file.default", "Symbol('s0')", "__enum__", "as_expr"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12) | st.sampled_from(
        ["target", "as_operator", "expr_str", "metadata", "as_tensor", "name", "as_custom_obj", "config", "sizes", "in_spec"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON document with each of its keys."""
    result: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        value = stack.pop()
        keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in list(keys):
            result.append((value, key))
            stack.append(value[key])
    return result


@pytest.mark.slow(reason="screens thousands of damaged files")
@settings(max_examples=300)
@given(data=st.data())
def test_a_pt2_with_anything_in_its_json_is_refused_as_the_users_error_or_passes(
    good: Members, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([MODEL, "data/weights/model_weights_config.json"]))
    document = json.loads(good[name])
    for _ in range(data.draw(st.integers(1, 3))):
        choices = places(document)
        container, key = choices[data.draw(st.integers(0, len(choices) - 1))]
        container[key] = data.draw(JSON_VALUES)
    path = write(tmp_path_factory.getbasetemp() / "mutated", good | {name: json.dumps(document).encode()})
    assert refusal_reason(path) in SCREENING_REASONS


@pytest.mark.slow(reason="screens thousands of damaged files")
@settings(max_examples=300)
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8), tail=st.booleans()
)
def test_a_pt2_with_any_bytes_changed_is_refused_as_the_users_error_or_passes(
    good: Members, tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[float, int]], tail: bool
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "flipped", good)
    data = bytearray(path.read_bytes())
    directory = struct.unpack_from("<I", data, len(data) - 6)[0] if tail else 0
    for place, value in edits:
        data[directory + int(place * (len(data) - directory))] = value
    path.write_bytes(data)
    assert refusal_reason(path) in SCREENING_REASONS


@pytest.mark.slow(reason="screens thousands of damaged files")
@settings(max_examples=200)
@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_sample_inputs_with_any_bytes_changed_are_refused_or_pass(
    good: Members, tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[float, int]]
) -> None:
    samples = bytearray(good[SAMPLES])
    for place, value in edits:
        samples[int(place * len(samples))] = value
    path = write(tmp_path_factory.getbasetemp() / "samples", good | {SAMPLES: bytes(samples)})
    assert refusal_reason(path) in SCREENING_REASONS


def test_the_daemon_leaves_many_expressions_to_the_child_and_parses_equal_ones_once(
    good: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def many(count: int, different: bool) -> Callable[[Any], None]:
        texts = [f"Add(Symbol('s0'), Integer({index if different else 0}))" for index in range(count)]
        return lambda program: program.update(more=[{"expr_str": text} for text in texts])

    looked: list[str] = []
    parse = ast.parse

    def counted(text: str, **options: Any) -> ast.AST:
        looked.append(text)
        return parse(text, **options)

    monkeypatch.setattr(ast, "parse", counted)
    screen.screen_upload(write(tmp_path / "m", changed(good, many(5000, different=False))))
    assert len(looked) == len(set(looked)) < 100
    looked.clear()
    screen.screen_upload(write(tmp_path / "m", changed(good, many(10_000, different=True))))
    assert looked == []
    screen.screen_pt2(write(tmp_path / "m", changed(good, many(10_000, different=True))))
    assert len(looked) > 10_000
