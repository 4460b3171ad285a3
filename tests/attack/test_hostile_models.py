"""Hostile .pt2 files against a real server: each is refused by name before anything of it runs, and nothing leaks."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etfarm.client import Farm
from etfarm.server.compile.screening import screen
from etfarm.wire.errors import EtfarmError
from tests.support import hostile, models
from tests.support.farm import FarmProcess
from tests.support.hostile import LENGTH, MODEL, SAMPLES, WEIGHTS, Members, argument, changed, reads, replaces_ones, write

pytestmark = pytest.mark.slow(reason="a farm compiles hostile models")

SECRET = "9f2c51c7a40e4d4b8f10e5a2bb7d6c3388aa0d51"
QUANTIZED = "xnnpack_pt2e_int8_static_per_channel"


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server whose tokens file is worth reading."""
    folder = tmp_path_factory.mktemp("attack")
    tokens(folder).write_text(f"root admin {SECRET}\nmallory user mallorys-own-token-of-some-length\n")
    tokens(folder).chmod(0o600)
    running = FarmProcess(folder, bundle=False, serve=["--tokens", str(tokens(folder))], executes=True)
    running.start(agents=0)
    yield running
    running.stop()


def tokens(folder: Path) -> Path:
    return folder / "tokens"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return hostile.members(hostile.host(), tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return hostile.members(hostile.branches(), tmp_path_factory.mktemp("branches"))


def refusal(farm: FarmProcess, path: Path, recipe: str = "xnnpack_fp32") -> EtfarmError:
    """Return the error of a user's compilation of the file, at submission or later."""
    with Farm(farm.address, token="mallorys-own-token-of-some-length") as client, pytest.raises(EtfarmError) as caught:
        client.compile(path, recipe).result().report  # noqa: B018 - raises the failed cell's error
    return caught.value


def stored_secrets(farm: FarmProcess) -> list[Path]:
    """Return the files of the server's store with the tokens file's content, as bytes or as the floats that a constant has."""
    as_floats = struct.pack("<16f", *f"root admin {SECRET}".encode()[:16])
    needles = (SECRET.encode(), f"root admin {SECRET}".encode()[:16], as_floats)
    result = []
    for path in (farm.folder / "server" / "artifacts").rglob("*"):
        if path.is_file() and any(needle in path.read_bytes() for needle in needles):
            result.append(path)
    return result


@pytest.mark.parametrize("recipe", ["xnnpack_fp32", QUANTIZED])
@pytest.mark.parametrize("large", [False, True], ids=["small", "left to the child"])
def test_a_model_that_reads_the_tokens_file_is_refused_by_name(
    farm: FarmProcess, good: Members, tmp_path: Path, recipe: str, large: bool
) -> None:
    evil = changed(good, reads(tokens(farm.folder)))
    if large:
        evil[MODEL] += b" " * screen.UPLOAD_PARSED_BYTES
    error = refusal(farm, write(tmp_path / "evil.pt2", evil), recipe)
    assert (error.reason, error.metadata["operator"]) == ("UNSAFE_MODEL", "aten.from_file.default")
    assert "aten::from_file" in error.message and "--allow-operators" in error.remedy
    assert stored_secrets(farm) == []


TENSOR = argument("self", "as_tensor", {"name": "x"})
FORBIDDEN: dict[str, list[Any]] = {
    "aten.from_file.out": [argument("filename", "as_string", "/etc/hostname")],
    "aten.save.default": [
        argument("item", "as_tensor", {"name": "x"}),
        argument("filename", "as_string", "/tmp/etfarm-was-here"),
    ],
    "aten.set_.source_Tensor": [TENSOR, argument("source", "as_tensor", {"name": "x"})],
    "aten.set_.source_Tensor_storage_offset": [TENSOR],
    "aten._reshape_alias.default": [TENSOR, argument("size", "as_ints", [1 << 20]), argument("stride", "as_ints", [1])],
    "aten.resize_.default": [TENSOR, argument("size", "as_ints", [1 << 20])],
    "aten._sparse_coo_tensor_unsafe.default": [argument("indices", "as_tensor", {"name": "x"})],
    "aten._nested_view_from_buffer.default": [TENSOR],
    "aten.to_mkldnn.default": [TENSOR],
    "aten.record_stream.default": [TENSOR],
    "aten.eval.default": [argument("a", "as_string", "__import__")],
    "prim.rpc_sync.default": [argument("dst", "as_string", "127.0.0.1")],
    "prim.Print.default": [TENSOR],
    "prim.CudaFusionGroup.default": [TENSOR],
    "profiler._record_function_enter_new.default": [argument("name", "as_string", "x")],
    "c10d.send.default": [TENSOR],
    "_c10d_functional.all_reduce.default": [TENSOR],
    "inductor._reinterpret_tensor.default": [TENSOR],
    "mkldnn._linear_pointwise.default": [TENSOR],
    "quantized.linear_prepack.default": [TENSOR],
    "torchao.da8w4_linear_prepack_cpu.default": [TENSOR],
    "higher_order.call_torchbind": [TENSOR],
    "higher_order.print": [argument("format_str", "as_string", "{x.__class__}")],
    "higher_order.triton_kernel_wrapper_mutation": [TENSOR],
    "higher_order.dynamo_bypassing_wrapper": [argument("wrapper_fn_or_key", "as_string", "x")],
    "higher_order.executorch_call_delegate": [TENSOR],
}


@pytest.mark.parametrize("operator", FORBIDDEN)
def test_an_operator_with_side_effects_is_refused_by_name(
    farm: FarmProcess, good: Members, tmp_path: Path, operator: str
) -> None:
    error = refusal(farm, write(tmp_path / "m.pt2", changed(good, replaces_ones(f"torch.ops.{operator}", FORBIDDEN[operator]))))
    assert (error.reason, error.metadata["operator"]) == ("UNSAFE_MODEL", operator)


def test_an_operator_of_an_unknown_library_is_refused_by_name(farm: FarmProcess, good: Members, tmp_path: Path) -> None:
    error = refusal(farm, write(tmp_path / "m.pt2", changed(good, replaces_ones("torch.ops.evil.run.default", []))))
    assert error.reason == "UNKNOWN_OPERATOR"
    assert "evil::run" in error.message


def test_a_forbidden_operator_within_a_branch_is_refused(farm: FarmProcess, branches: Members, tmp_path: Path) -> None:
    def change(program: Any) -> None:
        condition = hostile.node(program["graph_module"]["graph"], "torch.ops.higher_order.cond")
        branch = next(one["arg"]["as_graph"]["graph"] for one in condition["inputs"] if "as_graph" in one["arg"])
        hostile.node(branch, "torch.ops.aten.ones.default")["target"] = "torch.ops.aten.from_file.default"

    error = refusal(farm, write(tmp_path / "m.pt2", changed(branches, change)))
    assert (error.reason, error.metadata["operator"]) == ("UNSAFE_MODEL", "aten.from_file.default")


def test_a_forbidden_operator_as_an_argument_is_refused(farm: FarmProcess, good: Members, tmp_path: Path) -> None:
    inputs = [argument("", "as_operator", "torch.ops.aten.from_file.default")]
    change = replaces_ones("torch.ops.higher_order.auto_functionalized", inputs)
    error = refusal(farm, write(tmp_path / "m.pt2", changed(good, change)))
    assert (error.reason, error.metadata["operator"]) == ("UNSAFE_MODEL", "aten.from_file.default")


def spec(node: dict[str, Any]) -> Callable[[Any], None]:
    """Put a node into the treespec of the program's inputs."""

    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        tree = json.loads(signature["in_spec"])
        tree[1]["children_spec"][1] = node
        signature["in_spec"] = json.dumps(tree)

    return change


ENUM = {"__enum__": True, "fqn": "this:c", "name": "x"}


def factory(module: str, name: str) -> dict[str, Any]:
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": []}
    return {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []}


def shape(sizes: list[int], strides: list[int], offset: int = 0) -> Callable[[Any], None]:
    """Give the first weight another view of its bytes."""

    def change(config: Any) -> None:
        meta = next(iter(config["config"].values()))["tensor_meta"]
        meta["sizes"] = [{"as_int": size} for size in sizes]
        meta["strides"] = [{"as_int": stride} for stride in strides]
        meta["storage_offset"] = {"as_int": offset}

    return change


def metadata(key: str, value: str) -> Callable[[Any], None]:
    return lambda program: program["graph_module"]["graph"]["nodes"][0]["metadata"].update({key: value})


def parameter(name: str) -> Callable[[Any], None]:
    def change(program: Any) -> None:
        specs = program["graph_module"]["signature"]["input_specs"]
        next(one["parameter"] for one in specs if "parameter" in one)["parameter_name"] = name

    return change


def variable(name: str) -> Callable[[Any], None]:
    return lambda program: program["graph_module"]["graph"]["inputs"][0]["as_tensor"].update(name=name)


def custom_object(program: Any) -> None:
    program["graph_module"]["graph"]["inputs"].append({"as_custom_obj": {"name": "o", "class_fqn": "c"}})


CHANGES: dict[str, tuple[str, str, Callable[[Any], None]]] = {
    "a module imported for an enum": (MODEL, "UNSAFE_TREE",
        spec(
        {"type": "builtins.dict", "context": json.dumps([ENUM]), "children_spec": []})),
    "a module imported for a factory": (MODEL, "UNSAFE_TREE", spec(factory("this", "c"))),
    "a callable as a factory": (MODEL, "UNSAFE_TREE", spec(factory("builtins", "exec"))),
    "a private function looked up": (MODEL, "UNSAFE_NAME", metadata("source_fn_stack", "x,torch.nn.Module.__init__.__globals__")),
    "an attribute of Python's own set": (MODEL, "UNSAFE_NAME", parameter("forward.__func__.__defaults__")),
    "a variable that is an attribute": (MODEL, "UNSAFE_NAME", variable("torch.ops")),
    "another verifier": (MODEL, "UNSAFE_VERIFIER", lambda program: program.update(verifiers=["OLD_EXIR_ATEN_DISABLED"])),
    "a script object": (MODEL, "CODE_CONSTANT", custom_object),
    "weights beyond their member": (WEIGHTS, "OUT_OF_BOUNDS", shape([1 << 20], [1])),
    "weights that start beyond their member": (WEIGHTS, "OUT_OF_BOUNDS", shape([1], [1], 1 << 40)),
    "weights that repeat without end": (WEIGHTS, "OUT_OF_BOUNDS", shape([1 << 40], [0])),
    "weights of more dims than torch has": (WEIGHTS, "OUT_OF_BOUNDS", shape([1] * 65, [1] * 65)),
    "an operator in the weights' config": (WEIGHTS, "UNSAFE_NAME",
        lambda config: config["config"].update({"a'b": next(iter(config["config"].values()))})),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_an_unsafe_graph_or_weights_config_is_refused(farm: FarmProcess, good: Members, tmp_path: Path, name: str) -> None:
    member, vector, change = CHANGES[name]
    error = refusal(farm, write(tmp_path / "m.pt2", changed(good, change, member)))
    assert (error.reason, error.metadata.get("vector")) == ("UNSAFE_MODEL", vector)


def test_an_empty_member_is_not_expanded_to_zeros(farm: FarmProcess, good: Members, tmp_path: Path) -> None:
    weight = json.loads(good[WEIGHTS])["config"]["linear.weight"]["path_name"]

    def huge(config: Any) -> None:
        config["config"]["linear.weight"]["tensor_meta"]["sizes"] = [{"as_int": 1 << 20}, {"as_int": 1 << 20}]

    contents = changed(good, huge, WEIGHTS) | {f"data/weights/{weight}": b""}
    assert refusal(farm, write(tmp_path / "m.pt2", contents)).metadata["vector"] == "OUT_OF_BOUNDS"


def twice(path: Path, good: Members) -> None:
    """Return two graphs with the same name: Python reads the last, torch the first."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/" + MODEL, good[MODEL])


def packed(path: Path, good: Members) -> None:
    """Return a megabyte that decompresses to a gigabyte."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/extra/bomb", bytes(1 << 24))


def encrypted(path: Path, good: Members) -> None:
    data = bytearray(path.read_bytes())
    (start,) = struct.unpack_from("<I", data, len(data) - 6)
    data[start + 8] |= 1
    path.write_bytes(data)


def shared(path: Path, good: Members) -> None:
    """Return a second member that shares the first member's bytes."""
    data = path.read_bytes()
    length, start = struct.unpack_from("<II", data, len(data) - 10)
    count = struct.unpack_from("<H", data, len(data) - 12)[0]
    entry = bytearray(data[start : data.index(b"PK\x01\x02", start + 4)])
    entry[-1] ^= 1  # another name for the same bytes
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count + 1, count + 1, length + len(entry), start, 0)
    path.write_bytes(data[: start + length] + entry + end)


def two_directories(path: Path, good: Members) -> None:
    """A zip64 locator that leads torch's reader to another directory than Python's."""
    data = path.read_bytes()
    length, start = struct.unpack_from("<II", data, len(data) - 10)
    count = struct.unpack_from("<H", data, len(data) - 12)[0]
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, 0, 1)
    path.write_bytes(data[:-22] + record + locator + data[-22:])


def leaves(path: Path, good: Members) -> None:
    write(path, good | {"extra/../../../etc/cron.d/x": b""})


def commands_the_terminal(path: Path, good: Members) -> None:
    write(path, good | {"extra/\x1b]0;owned\x07": b""})


@pytest.mark.parametrize("trick", [twice, packed, encrypted, shared, two_directories, leaves, commands_the_terminal])
def test_an_ambiguous_zip_is_refused(
    farm: FarmProcess, good: Members, tmp_path: Path, trick: Callable[[Path, Members], None]
) -> None:
    path = write(tmp_path / "m.pt2", good)
    trick(path, good)
    error = refusal(farm, path)
    refusals = [("UNSAFE_MODEL", "AMBIGUOUS_ZIP")]
    if trick is two_directories:
        refusals.append(("NOT_A_PT2", None))  # by the client, whose Python does not read it since its security updates of 2025
    assert (error.reason, error.metadata.get("vector")) in refusals
    assert error.message.isprintable()


def test_a_pickle_that_calls_is_refused(farm: FarmProcess, good: Members, tmp_path: Path) -> None:
    error = refusal(farm, write(tmp_path / "m.pt2", good | {SAMPLES: b"cos\nsystem\n(S'touch /tmp/etfarm-was-here'\ntR."}))
    assert (error.reason, error.metadata["vector"]) == ("UNSAFE_MODEL", "NOT_WEIGHTS_ONLY")


def test_a_view_beyond_its_tensor_fails_as_the_users_error(farm: FarmProcess, good: Members, tmp_path: Path) -> None:
    """as_strided is a core operator; torch checks its bounds when it computes."""
    inputs = [TENSOR, argument("size", "as_ints", [LENGTH]), argument("stride", "as_ints", [1 << 30])]
    error = refusal(
        farm, write(tmp_path / "m.pt2", changed(good, replaces_ones("torch.ops.aten.as_strided.default", inputs))), QUANTIZED
    )
    assert error.fault.name == "USER"
    assert error.reason not in ("UNSAFE_MODEL", "CHILD_DIED")


def sized(*texts: str) -> Callable[[Any], None]:
    """Give the tensors of the program sizes that are expressions."""

    def change(program: Any) -> None:
        values = program["graph_module"]["graph"]["tensor_values"]
        tensor = next(iter(values.values()))
        for number, text in enumerate(texts):
            values[f"more_{number}"] = tensor | {"sizes": [{"as_expr": {"expr_str": text}}] * len(tensor["sizes"])}
        tensor["sizes"] = [{"as_expr": {"expr_str": texts[0]}}, *tensor["sizes"][1:]]

    return change


SUM = "Add(" + ", ".join(f"Symbol('s{number}', positive=True, integer=True)" for number in range(30)) + ")"


@pytest.mark.parametrize("large", [False, True], ids=["small", "left to the child"])
@pytest.mark.parametrize("text", ["1e9999999", f"Mul(Pow({SUM}, Integer(8)), Pow(Add({SUM}, Integer(1)), Integer(8)))"])
def test_a_size_that_takes_for_ever_is_refused_before_it_is_computed(
    farm: FarmProcess, good: Members, tmp_path: Path, text: str, large: bool
) -> None:
    evil = changed(good, sized(text))
    if large:
        evil[MODEL] += b" " * screen.UPLOAD_PARSED_BYTES
    error = refusal(farm, write(tmp_path / "m.pt2", evil))
    assert (error.reason, error.metadata["vector"]) == ("UNSAFE_MODEL", "UNSAFE_EXPRESSION")


def longer(count: int) -> Callable[[Any], None]:
    """Give the program more nodes, which nothing uses."""

    def change(program: Any) -> None:
        graph = program["graph_module"]["graph"]
        last = hostile.node(graph, "torch.ops.aten.add.Tensor")
        values, name = graph["tensor_values"], last["outputs"][0]["as_tensor"]["name"]
        for number in range(count):
            values[f"more_{number}"] = values[name]
            graph["nodes"].append(last | {"outputs": [{"as_tensor": {"name": f"more_{number}"}}]})

    return change


def test_a_graph_that_takes_too_long_to_load_ends_by_its_time_and_names_it(
    farm: FarmProcess, good: Members, tmp_path: Path
) -> None:
    """It takes 75 s on the processor of the writer, and more than 30 s on any."""
    error = refusal(farm, write(tmp_path / "m.pt2", changed(good, longer(150_000))))
    assert (error.fault.name, error.reason) == ("USER", "MODEL_LOADING_TIMED_OUT")
    assert error.metadata["clock"] == "loading" and "Split a graph" in error.remedy


def test_marked_sample_inputs_are_not_taken_for_code(farm: FarmProcess, tmp_path: Path) -> None:
    """torch.export marks those of a dimension that is given as `Dim.DYNAMIC`."""
    path = tmp_path / "marked.pt2"
    torch.export.save(models.marked_dynamic(), path)
    with Farm(farm.address, token="mallorys-own-token-of-some-length") as client:
        assert client.compile(path, "xnnpack_fp32").result().report.error is None


def test_the_server_compiles_a_valid_model_after_all_attacks(farm: FarmProcess, good: Members, tmp_path: Path) -> None:
    with Farm(farm.address, token="mallorys-own-token-of-some-length") as client:
        report = client.compile(write(tmp_path / "m.pt2", good), "xnnpack_fp32").result().report
    assert report.error is None
    assert not Path("/tmp/etfarm-was-here").exists()
