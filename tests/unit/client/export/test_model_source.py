"""MODEL arguments: the meaning of each form, and the errors for a wrong file or factory."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from etfarm.client.export import DEMOS, Demo, FileFactory, ModelSource, ModuleFactory, Pt2File, PteFile, load_source, resolve
from etfarm.client.export import errors as e
from etfarm.client.export.spec import label_of
from etfarm.client.submit.preparation import prepare
from etfarm.wire.errors import EtfarmError
from tests.support.exports import read_program
from tests.support.golden import Golden
from tests.support.refusals import refuses

NET = """
import torch
from torch import nn
import sibling

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        return self.linear(x)

def make():
    return Net().eval(), (torch.ones(1, 2),)
def rows(n):
    return make()
def bare():
    return Net().eval()
def tensor():
    return Net().eval(), torch.ones(1, 2)
def count():
    return 5
def bent():
    return Net().eval(), 5
def three():
    return Net().eval(), (torch.ones(1, 2),), None
async def later():
    return make()
def breaks():
    value = {}
    return value["weights"]
def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text(NET)
    (tmp_path / "models" / "sibling.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pt2() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.ReLU().eval(), (torch.ones(2),)), buffer)
    return buffer.getvalue()


def pte(program: int = 128, base: int = 128, segments: int = 64, head: bytes = b"ET12", size: int | None = None) -> bytes:
    data = struct.pack("<I", 48) + head + b"eh00" + struct.pack("<IQQQ", 32, program, base, segments)
    total = base + segments if size is None else size
    return data.ljust(total, b"\0")[:total]


def refusal(text: str) -> EtfarmError:
    with pytest.raises(EtfarmError) as caught:
        spec = resolve(text)
        assert isinstance(spec, FileFactory | ModuleFactory)
        load_source(spec)
    return caught.value


def test_importing_the_package_and_resolving_loads_no_torch() -> None:
    code = (
        "import sys; from etfarm.client.export import resolve, ModelSource; resolve('demo:resnet8');"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False False\n"


def test_each_form_is_taken_for_what_it_is(folder: Path, pt2: bytes) -> None:
    Path("a.pt2").write_bytes(pt2)
    Path("B.PTE").write_bytes(pte())
    assert resolve("a.pt2") == Pt2File(Path("a.pt2"))
    assert resolve("B.PTE") == PteFile(Path("B.PTE"))
    assert resolve("models/net.py:make") == FileFactory(Path("models/net.py"), "make")
    assert resolve("my_package.models:make") == ModuleFactory("my_package.models", "make")
    assert [resolve(f"demo:{name}") for name in DEMOS] == [Demo(name) for name in DEMOS]
    texts = ("a.pt2", "models/net.py:make", "demo:ds_cnn")
    assert [resolve(text).label for text in texts] == [label_of(text) for text in texts] == ["a", "net:make", "ds_cnn"]


@pytest.mark.parametrize("text", ["resnet8", "x.onnx", "", ":make", "a b:make", "x.py:", "net:not-a-name", "model.pt"])
def test_any_other_source_is_refused_with_all_forms(golden: Golden, text: str) -> None:
    with pytest.raises(e.BadModelArgument) as refused:
        resolve(text)
    golden.check(refused.value)


def test_a_file_without_a_function_is_refused_with_a_remedy(golden: Golden) -> None:
    with pytest.raises(e.BadModelArgument) as refused:
        resolve("net.py")
    golden.check(refused.value)


def test_an_unknown_demo_is_refused_with_the_nearest_and_all_names(golden: Golden) -> None:
    with refuses("UNKNOWN_DEMO") as refused:
        resolve("demo:DS-CNN")
    golden.check(refused.value)


def test_a_missing_file_is_reported_with_the_nearest_name(folder: Path) -> None:
    error = refusal("models/nett.py:make")
    assert error.reason == "MODEL_NOT_FOUND" and "Did you mean models/net.py?" in str(error)
    assert refusal("nothing/x.pt2").reason == "MODEL_NOT_FOUND"
    Path("folder.pte").mkdir()
    assert "is a folder" in str(refusal("folder.pte"))


@pytest.mark.remedy("TRUNCATED_PROGRAM", "NOT_A_PTE")
def test_an_invalid_or_truncated_program_is_reported_at_once(folder: Path) -> None:
    path = Path("x.pte")
    whole = pte()
    for cut in (100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        error = refusal("x.pte")
        assert error.reason == "TRUNCATED_PROGRAM" and error.metadata["expected_bytes"] == str(len(whole))
    for data in (b"", b"ET12", b"PK\x03\x04" + bytes(200), pte(head=b"TFL3")):
        path.write_bytes(data)
        assert refusal("x.pte").reason == "NOT_A_PTE"
    path.write_bytes(pte(head=b"ET11"))
    assert "ET11" in str(refusal("x.pte"))
    path.write_bytes(pte(program=200, base=0, segments=0, size=199))
    assert refusal("x.pte").reason == "TRUNCATED_PROGRAM"
    path.write_bytes(struct.pack("<I", 8) + b"ET12" + bytes(40))  # no extended header: old, and sound
    assert resolve("x.pte") == PteFile(path)
    path.write_bytes(whole)
    assert resolve("x.pte") == PteFile(path), "it is copied or exported again"


def test_an_invalid_archive_is_refused_with_its_likely_kind(folder: Path, pt2: bytes) -> None:
    path = Path("x.pt2")
    path.write_bytes(pt2[:-100])
    assert "cut-off" in str(refusal("x.pt2"))
    path.write_bytes(b"hello")
    assert refusal("x.pt2").reason == "NOT_A_PT2"
    torch.save({"w": torch.ones(2)}, path)
    assert "checkpoint" in str(refusal("x.pt2"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "")
    assert "is a zip file" in str(refusal("x.pt2"))


def test_a_file_factory_runs_seeded_with_its_folder_on_the_path_and_says_so(folder: Path) -> None:
    text: list[str] = []
    spec = FileFactory(Path("models/net.py"), "make")
    before = list(sys.path)
    first = load_source(spec, say=text.append)
    torch.rand(5)
    second = load_source(spec)
    assert isinstance(first, ModelSource) and list(first.methods) == ["forward"]
    assert torch.equal(first.methods["forward"].linear.weight, second.methods["forward"].linear.weight)
    assert text == ["Seeded torch, numpy and random with 0 before calling models/net.py:make."]
    assert sys.path == before


def test_two_files_of_one_stem_do_not_meet(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "net.py").write_text("import torch\ndef make():\n    return torch.nn.ReLU().eval(), (torch.ones(1),)\n")
    assert type(load_source(FileFactory(Path("models/net.py"), "make")).methods["forward"]).__name__ == "Net"
    assert type(load_source(FileFactory(Path("other/net.py"), "make")).methods["forward"]).__name__ == "ReLU"
    assert type(load_source(FileFactory(Path("models/net.py"), "make")).methods["forward"]).__name__ == "Net"


def test_a_module_factory_is_found_from_the_working_folder(folder: Path) -> None:
    (folder / "farm_models").mkdir()
    (folder / "farm_models" / "relu.py").write_text(
        "import torch\nfrom etfarm.client.export import ModelSource\n"
        "def make():\n    return ModelSource.of(torch.nn.ReLU().eval(), (torch.ones(1),), method='act')\n"
    )
    assert list(load_source(ModuleFactory("farm_models.relu", "make")).methods) == ["act"]
    assert refusal("farm_models.relux:make").reason == "MODEL_NOT_FOUND"
    assert refusal("nowhere_at_all.models:make").reason == "MODEL_NOT_FOUND"


def test_a_missing_factory_is_reported_with_the_existing_ones(folder: Path) -> None:
    error = refusal("models/net.py:build")
    assert error.reason == "FACTORY_NOT_FOUND"
    assert error.metadata["functions"].split(",")[:2] == ["make", "rows"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bare", "FACTORY_RETURNED_SOMETHING_ELSE"),
        ("three", "FACTORY_RETURNED_SOMETHING_ELSE"),
        ("later", "FACTORY_RETURNED_SOMETHING_ELSE"),
        ("count", "FACTORY_RETURNED_SOMETHING_ELSE"),
        ("bent", "EXAMPLE_INPUTS_NOT_A_TUPLE"),
        ("tensor", "EXAMPLE_INPUTS_NOT_A_TUPLE"),
        ("rows", "FACTORY_FAILED"),
        ("breaks", "FACTORY_FAILED"),
        ("leaves", "FACTORY_FAILED"),
    ],
)
def test_a_factory_that_returns_no_model_gets_a_reason(golden: Golden, folder: Path, name: str, reason: str) -> None:
    error = refusal(f"models/net.py:{name}")
    assert error.reason == reason
    with pytest.raises(EtfarmError) as refused:
        raise error
    golden.check(refused.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\nif x\n", "SyntaxError.*broken.py:2"),
        ("\nimport no_such_dependency.deep\n", "broken.py:2.*Install 'no_such_dependency'"),
        ("from . import sibling\n", "package.module:factory"),
        ("1 / 0\n", "ZeroDivisionError.*broken.py:1"),
    ],
)
def test_a_file_that_fails_on_import_is_reported_with_its_line(folder: Path, code: str, words: str) -> None:
    (folder / "broken.py").write_text(code)
    with pytest.raises(e.FactoryFailed, match=words):
        load_source(FileFactory(Path("broken.py"), "make"))


def test_a_source_whose_parts_do_not_fit_is_refused(golden: Golden) -> None:
    net, x = torch.nn.ReLU().eval(), torch.ones(1)
    with refuses("BAD_MODEL_SOURCE") as refused:
        ModelSource(methods={"a": net}, example_inputs={})
    golden.check(refused.value)
    with refuses("BAD_MODEL_SOURCE") as refused:
        ModelSource(methods={"a": net}, example_inputs={"a": (x,), "b": (x,)})
    golden.check(refused.value)
    with refuses("BAD_MODEL_SOURCE", match="both"):
        ModelSource.of(net, (x,), constant_methods={"forward": 1})
    with refuses("DYNAMIC_SHAPES_FORM") as refused:
        ModelSource(methods={"a": net}, example_inputs={"a": (x,)}, dynamic_shapes={"input": {0: None}})
    golden.check(refused.value)
    with refuses("EXAMPLE_INPUTS_NOT_A_TUPLE"):
        ModelSource.of(net, (x,), calibration_inputs=[x])  # type: ignore[list-item]


class Echo(torch.nn.Module):
    """A language model in its signature only."""

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens[:, -1], 8).float() + position


def test_a_causal_lm_has_a_dynamic_length_and_the_metadata_of_executorchs_runner() -> None:
    source = ModelSource.causal_lm(Echo().eval(), max_context_tokens=32, vocab_size=8, constant_methods={"get_bos_id": 1})
    assert source.constant_methods == {
        "get_max_seq_len": 32, "get_max_context_len": 32, "get_vocab_size": 8, "use_kv_cache": True,
        "enable_dynamic_shape": True, "get_bos_id": 1,
    }  # fmt: skip
    tokens, position = source.example_inputs["forward"]
    assert tokens.shape == (1, 3) and position.tolist() == [0]
    (dims, of_position) = source.dynamic_shapes["forward"]
    assert dims[1].max == 31 and of_position is None
    static = ModelSource.causal_lm(Echo().eval(), max_context_tokens=32, vocab_size=8, max_prompt_tokens=1)
    assert static.example_inputs["forward"][0].shape == (1, 1) and not static.dynamic_shapes


@pytest.mark.parametrize(
    "sizes", [{"max_context_tokens": 1}, {"vocab_size": 0}, {"max_prompt_tokens": 0}, {"max_prompt_tokens": 40}]
)
def test_a_causal_lm_of_impossible_sizes_is_refused(sizes: dict[str, int]) -> None:
    with refuses("BAD_MODEL_SOURCE"):
        ModelSource.causal_lm(Echo().eval(), **{"max_context_tokens": 32, "vocab_size": 8, **sizes})


def test_a_causal_lm_takes_tokens_and_a_position() -> None:
    with refuses("BAD_MODEL_SOURCE", match="takes input"):
        ModelSource.causal_lm(torch.nn.Identity(), max_context_tokens=32, vocab_size=8)


def test_each_factory_of_a_file_has_its_own_modules(folder: Path) -> None:
    first, second = (load_source(FileFactory(Path("models/net.py"), name)).methods["forward"] for name in ("make", "make"))
    assert type(first) is not type(second)
    assert type(first).__module__ == type(second).__module__ == "etfarm_model_net"


def test_a_loaded_model_imports_its_own_modules_while_it_is_exported(folder: Path) -> None:
    code = (
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        from late import SCALE\n"
        "        return x * SCALE\ndef make():\n    return Net().eval(), (torch.ones(2),)\n"
    )
    for side, scale in (("base", 2), ("candidate", 3)):
        (folder / side).mkdir()
        (folder / side / "net.py").write_text(code)
        (folder / side / "late.py").write_text(f"SCALE = {scale}\n")
    sources = [load_source(FileFactory(folder / side / "net.py", "make")) for side in ("base", "candidate")]
    models = [prepare(source) for source in sources]
    programs = [read_program(model.methods["forward"].pt2) for model in models]
    assert [program.module()(torch.ones(2)).tolist() for program in programs] == [[2, 2], [3, 3]]
    assert [[file.path for file in model.sources] for model in models] == [["late.py", "net.py"]] * 2


def test_a_torchvision_for_another_torch_is_named(folder: Path) -> None:
    failing = "def fails():\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
    Path("models/net.py").write_text(failing)
    with pytest.raises(e.FactoryFailed) as failed:
        load_source(FileFactory(Path("models/net.py"), "fails"))
    assert failed.value.remedy.startswith("torchvision was built for another torch")


@pytest.mark.parametrize(
    ("text", "label"),
    [("gone/x.pte", "x"), ("gone.py:make", "gone:make"), ("package.module:make", "package.module:make"), ("ds_cnn", "ds_cnn")],
)
def test_a_model_keeps_its_name_when_its_file_is_gone(text: str, label: str) -> None:
    assert label_of(text) == label
