"""Inputs and outputs of a library's own classes: exported as dicts of their fields, which give the outputs their names."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from etfarm.client.export import ExportedMethod, ModelSource, export_source
from etfarm.client.export.eager import archive_of
from etfarm.server.compile.program import values
from etfarm.server.compile.screening import screen
from etfarm.wire.errors import EtfarmError
from tests.support.exports import Function, read_program
from tests.support.golden import Golden


class ModelOutput(OrderedDict[str, Any]):
    """As in transformers: a dict of a class of its own, registered without the paths of its leaves."""


pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
    serialized_type_name="library.ModelOutput",
)


@dataclass
class Batch:
    left: Tensor
    right: Tensor
    mask: Tensor | None = None


torch.export.register_dataclass(Batch, serialized_type_name="users.Batch")
Pair = namedtuple("Pair", "low high")


class Unregistered:
    pass


class StaticKeysCache:
    pass


class Encoder(nn.Module):
    def forward(self, x: Tensor) -> ModelOutput:
        return ModelOutput(logits=x * 2, hidden_states=(x + 1, Pair(x - 1, x - 2)), x=x)


class Both(nn.Module):
    def forward(self, batch: Batch, *, scale: Pair) -> Batch:
        return Batch(batch.left @ scale.low, batch.right + scale.high)


class Sized(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        return batch.left[: batch.right.shape[0] // 2] * 2


def method(source: ModelSource) -> ExportedMethod:
    return export_source(source, name="m").methods["forward"]


def test_an_output_of_a_librarys_class_is_a_dict_whose_keys_name_the_outputs() -> None:
    exported = method(ModelSource.of(Encoder().eval(), (torch.ones(3),)))
    names = ("logits", "hidden_states_0", "hidden_states_1_low", "hidden_states_1_high", "x")
    assert exported.output_names == names
    program = read_program(exported.pt2)
    result = program.module()(torch.ones(3))
    assert type(result) is dict and list(result) == ["logits", "hidden_states", "x"]
    assert torch.equal(result["hidden_states"][1]["low"], torch.zeros(3))


def test_registered_containers_of_inputs_are_dicts_in_the_archive(tmp_path: Any) -> None:
    batch = Batch(torch.ones(4, 3), torch.ones(2))
    scale = Pair(torch.ones(3, 2), torch.full((2,), 5.0))
    samples = [(Batch(torch.zeros(4, 3), torch.ones(2)),)]
    source = ModelSource.of(
        Both().eval(), (batch,), example_kwargs={"scale": scale}, calibration_inputs=samples,
        dynamic_shapes={"batch": [{0: Dim("n", max=64)}, None], "scale": Pair(None, None)},
    )  # fmt: skip
    exported = method(source)
    assert exported.input_names == ("batch_left", "batch_right", "scale_low", "scale_high")
    assert exported.output_names == ("left", "right") and len(exported.calibration) == 1
    (tmp_path / "m.pt2").write_bytes(exported.pt2)  # type: ignore[arg-type]
    screen.screen_pt2(tmp_path / "m.pt2")
    program = read_program(exported.pt2)
    args, kwargs = program.example_inputs
    assert type(args[0]) is dict and type(kwargs["scale"]) is dict
    result = program.module()({"left": torch.ones(9, 3), "right": torch.ones(2)}, scale=dict(scale._asdict()))
    assert result["left"].shape == (9, 2) and torch.equal(result["right"], torch.full((2,), 6.0))


def test_guards_read_the_fields_of_dicts() -> None:
    dims = {"batch": [{0: Dim.DYNAMIC(max=64)}, {0: Dim.DYNAMIC(max=64)}]}
    exported = method(ModelSource.of(Sized().eval(), (Batch(torch.ones(8, 2), torch.ones(6)),), dynamic_shapes=dims))
    program = read_program(exported.pt2)
    assert program._guards_code and not any(".left" in guard or ".right" in guard for guard in program._guards_code)
    module = program.module()
    assert module({"left": torch.ones(9, 2), "right": torch.ones(10)}).shape == (5, 2)
    with pytest.raises(AssertionError, match="Guard failed"):
        module({"left": torch.ones(3, 2), "right": torch.ones(10)})


def test_a_users_program_keeps_its_own_structures() -> None:
    program = torch.export.export(Encoder().eval(), (torch.ones(3),))
    spec, names = program.call_spec.out_spec, [node.name for node in program.graph.nodes]
    assert read_program(archive_of(program)).call_spec.out_spec.type is dict
    assert program.call_spec.out_spec == spec and [node.name for node in program.graph.nodes] == names


KEYS: Final = [f"a{character}b" for character in map(chr, range(32, 127)) if character not in "'\".\\"]
"""Keys of modules with all characters of ASCII but those that servers refuse with a remedy, and the dot, which torch refuses."""


@pytest.mark.parametrize("strict", [False, True])
def test_torch_reads_programs_of_modules_with_any_keys(strict: bool) -> None:
    class Keyed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict({key: torch.nn.Linear(3, 3) for key in (*KEYS, "a[0](1)", "f(a, b); c")})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x).tanh()
            return x

    model, x = Keyed().eval(), torch.randn(2, 3)
    program = torch.export.export(model, (x,), strict=strict)
    stacks = [node.meta.get("nn_module_stack") for node in program.graph.nodes]
    read = read_program(archive_of(program))
    assert torch.equal(read.module()(x), model(x)) and set(read.state_dict) == set(model.state_dict())
    assert [node.meta.get("nn_module_stack") for node in program.graph.nodes] == stacks
    paths = [next(reversed(node.meta["nn_module_stack"].values()))[0] for node in read.graph.nodes if node.op == "call_function"]
    assert {"layers.a b", "layers.a_b", "layers.a:b", "layers.f_a_ b__ c"} <= set(paths)


class Label(Enum):
    CAT = 1
    DOG = "dog"


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda x: {"sum": x + 1, "x": x * 2, "b": x}, ("sum", "x", "b")),
        (lambda x: OrderedDict(a=x + 1), ("a",)),
        (lambda x: defaultdict(list, a=[x + 1]), ("a_0",)),
        (lambda x: (lambda y: {"a": y, "b": y})(x + 1), ("a", "b")),
        (lambda x: (x + 1, [x * 2]), ("0", "1")),
        (lambda x: (x + 1, [{"a": x * 2}, x]), ("0", "1_0_a", "2")),
        (lambda x: x + 1, ("0",)),
        (lambda x: {"a": 3, "b": x + 1}, ("a", "b")),
        (lambda x: {"self": x + 1, "b": x * 2}, ("self", "b")),
        (lambda x: {"température": x + 1, 'it\'s "so"': x, "出力/é%\n": [x * 2]}, ("température", 'it\'s "so"', "出力/é%\n_0")),
        (lambda x: {7: x + 1, True: x * 2, "plain": x}, ("7", "True", "plain")),
        (lambda x: {("a", 1): x + 1, ("b", (2, "é")): {"c": x}}, ("('a', 1)", "('b', (2, 'é'))_c")),
        (lambda x: {np.int64(3): x + 1, None: x * 2, 0.5: x}, ("3", "None", "0.5")),
        (lambda x: {Label.CAT: x + 1, Label.DOG: x * 2}, ("1", "dog")),
        (lambda x: {None: x + 1, "None": x * 2, 0.5: x, "0.5": {"a": x + 2}}, ("0", "None", "2", "0.5_a")),
        (lambda x: {"0": x, ("a", 1): x + 1, "('a', 1)": x * 2, Label.DOG: x, "dog": x + 2}, ("0", "1", "('a', 1)", "3", "dog")),
        (lambda x: {"1": x, None: x + 1, "None": x * 2, np.bool_(True): x + 2}, ("1", "1_", "None", "True")),
        (lambda x: {"": x + 1, "a": {"b_c": x}, "a_b": {"c": x * 2}}, ("0", "1", "2")),
        (lambda x: {"1": x + 1, "": x * 2}, ("0", "1")),
    ],
)
def test_outputs_have_the_names_of_their_keys(wrap: Any, names: tuple[str, ...], tmp_path: Path) -> None:
    exported = method(ModelSource.of(Function(wrap).eval(), (torch.ones(3),)))
    assert exported.output_names == names
    (tmp_path / "m.pt2").write_bytes(exported.pt2)  # type: ignore[arg-type]
    screen.screen_pt2(tmp_path / "m.pt2")
    program = read_program(exported.pt2)
    assert tuple(values.output_names(program)) == names
    plain, eager = pytree.tree_leaves(program.module()(torch.ones(3))), pytree.tree_leaves(wrap(torch.ones(3)))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, eager, strict=True))


class Reads(nn.Module):
    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def forward(self, batch: dict[Any, Tensor]) -> Tensor:
        x = batch[self.key]
        return x[: x.shape[0] // 2] * 2 + batch["plain"]


@pytest.mark.parametrize("key", ["é", "it's", '") or exit("', "{x}", 5, True, ("a", 1)])
def test_keys_of_inputs_that_a_guard_cannot_contain_are_replaced(key: Any, tmp_path: Path) -> None:
    batch = {key: torch.ones(8), "plain": torch.ones(1)}
    dims = {"batch": {key: {0: Dim.DYNAMIC(min=4, max=64)}, "plain": None}}
    exported = method(ModelSource.of(Reads(key).eval(), (batch,), dynamic_shapes=dims))
    (tmp_path / "m.pt2").write_bytes(exported.pt2)  # type: ignore[arg-type]
    screen.screen_pt2(tmp_path / "m.pt2")
    program = read_program(exported.pt2)
    args, kwargs = pytree.tree_unflatten([torch.ones(10), torch.ones(1)], program.call_spec.in_spec)
    assert program.module()(*args, **kwargs).shape == (5,)
    args, kwargs = pytree.tree_unflatten([torch.ones(3), torch.ones(1)], program.call_spec.in_spec)
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(*args, **kwargs)


def test_keys_of_inputs_that_would_become_equal_stay_apart() -> None:
    batch = {"é": torch.ones(8), "plain": torch.ones(1), ":e9:": torch.zeros(8), None: torch.ones(2)}
    dims = {"batch": {"é": {0: Dim.DYNAMIC(min=4, max=64)}, "plain": None, ":e9:": None, None: None}}
    program = read_program(method(ModelSource.of(Reads("é").eval(), (batch,), dynamic_shapes=dims)).pt2)
    args, _ = pytree.tree_unflatten([torch.ones(10), *list(batch.values())[1:]], program.call_spec.in_spec)
    assert list(args[0]) == ["0", "plain", ":e9:", "None"]
    assert program.module()(*args).tolist() == [3] * 5


@pytest.mark.parametrize("kind", [Unregistered, StaticKeysCache])
@pytest.mark.parametrize("strict", [False, True])
def test_an_object_that_cannot_be_taken_apart_is_named(kind: type, strict: bool, golden: Golden) -> None:
    source = ModelSource.of(Function(lambda x: (x, kind())).eval(), (torch.ones(3),))
    with pytest.raises(EtfarmError) as caught:
        export_source(source, name="m", strict=strict)
    assert (caught.value.reason, caught.value.metadata["output_type"]) == ("UNSUPPORTED_OUTPUT", kind.__name__)
    golden.check(caught.value)
