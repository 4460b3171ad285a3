"""Models of local folders of transformers, without a farm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from etfarm.client.export import HuggingFaceFolder, ModelSource, load_source, resolve  # noqa: E402
from etfarm.client.export.eager import export_source  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support.huggingface import CONTEXT, VOCABULARY, write_config  # noqa: E402
from tests.support.torchvision import torchvision_models  # noqa: E402

PROMPT = [5, 17, 3, 42, 8, 11]


def refusal(text: str) -> EtfarmError:
    with pytest.raises(EtfarmError) as refused:
        spec = resolve(text)
        assert isinstance(spec, HuggingFaceFolder)
        load_source(spec)
    return refused.value


def continued(decoder: Any, tokens: list[int], count: int) -> list[int]:
    """The greedy continuation by a prompt and single tokens."""
    answer: list[int] = []
    position = 0
    with torch.no_grad():
        for _ in range(count):
            new = tokens[position:] if not answer else answer[-1:]
            logits = decoder(torch.tensor([new]), torch.arange(position, position + len(new)))
            position += len(new)
            answer.append(int(logits[0, -1].argmax()))
    return answer


def expected(model: Any, tokens: list[int], count: int) -> list[int]:
    """The greedy continuation for which each step takes the whole text."""
    text = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(tokens) :]


def original(folder: Path) -> Any:
    """The model as transformers itself creates it from the same seed."""
    torchvision_models()
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True)).eval()


def test_resolving_a_folder_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    code = (
        "import sys; from etfarm.client.export import resolve;"
        f"print(resolve({f'hf:{folder}:max_context_tokens=32,dtype=float16'!r}).label, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "llama:max_context_tokens=32,dtype=float16:random False\n"


def test_a_folder_may_have_a_colon_and_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama").rename(tmp_path / "a:b=c")
    assert resolve(f"hf:{folder}") == HuggingFaceFolder(folder, (), True)
    assert resolve(f"hf:{folder}:seed=3") == HuggingFaceFolder(folder, (("seed", 3),), True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("context=5", "no option 'context'"),
        ("seed=1,seed=2", "'seed' twice"),
        ("seed=-1", "whole number"),
        ("seed=99999999", "1,048,576"),
        ("max_parameters=1e9", "whole number"),
        ("max_parameters=1000000000001", "1,000,000,000,000"),
        ("dtype=int8", "float32, float16"),
        ("attention=", "sdpa, custom"),
    ],
)
def test_an_option_is_checked_before_anything_is_loaded(tmp_path: Path, options: str, words: str) -> None:
    error = refusal(f"hf:{write_config(tmp_path, 'llama')}:{options}")
    assert error.reason == "BAD_MODEL_ARGUMENT" and words in str(error)


@pytest.mark.parametrize(
    ("files", "reason", "words"),
    [
        ({}, "MODEL_NOT_FOUND", "no config.json"),
        ({"config.json": "{"}, "BAD_CHECKPOINT", "not JSON"),
        ({"config.json": "[1]"}, "BAD_CHECKPOINT", "not a JSON object"),
        ({"config.json": "[" * 100_000}, "BAD_CHECKPOINT", "not JSON"),
        ({"config.json": " " * (4 << 20) + "{}"}, "BAD_CHECKPOINT", "more than 4 MiB"),
        ({"config.json": "{}"}, "BAD_CHECKPOINT", "no model_type"),
        ({"config.json": '{"model_type": "llama", "architectures": "x"}'}, "BAD_CHECKPOINT", "no model_type"),
        ({"config.json": '{"model_type": "llama", "quantization_config": {"bits": 4}}'}, "BAD_CHECKPOINT", "already quantized"),
        ({"config.json": '{"model_type": "llama"}', "pytorch_model.bin": "x"}, "BAD_CHECKPOINT", "a pickle"),
        ({"config.json": '{"model_type": "llama"}', "adapter_config.json": "{}"}, "BAD_CHECKPOINT", "an adapter of PEFT"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, files: dict[str, str], reason: str, words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    error = refusal(f"hf:{tmp_path}")
    assert error.reason == reason and words in str(error)
    assert refusal(f"hf:{tmp_path}/nothing").reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_a_decoder_with_a_static_cache_continues_like_the_model_without_one(tmp_path: Path, kind: str) -> None:
    folder = write_config(tmp_path, kind)
    source = ModelSource.huggingface(folder)
    # Beyond the window of mistral, whose 8 tokens end within the answer.
    assert continued(source.methods["forward"], PROMPT, 12) == expected(original(folder), PROMPT, 12)
    assert source.constant_methods["get_max_seq_len"] == CONTEXT and source.constant_methods["get_vocab_size"] == VOCABULARY
    tokens, positions = source.example_inputs["forward"]
    assert tokens.shape == (1, 3) and positions.tolist() == [0, 1, 2]


@pytest.mark.slow(reason="exports models of transformers")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_executorchs_attention_gives_the_same_continuation(tmp_path: Path, kind: str) -> None:
    folder = write_config(tmp_path, kind)
    source = ModelSource.huggingface(folder, attention="custom", max_context_tokens=32)
    assert continued(source.methods["forward"], PROMPT, 12) == expected(original(folder), PROMPT, 12)
    program = torch.export.export(
        source.methods["forward"],
        source.example_inputs["forward"],
        dynamic_shapes=source.dynamic_shapes["forward"],
        strict=False,
    )
    operators = [str(node.target) for node in program.graph.nodes]
    assert operators.count("llama.custom_sdpa.default") == 2 and operators.count("llama.update_cache.default") == 4


def test_executorchs_attention_does_not_take_a_window(tmp_path: Path) -> None:
    error = refusal(f"hf:{write_config(tmp_path, 'mistral')}:attention=custom")
    assert error.reason == "UNSUPPORTED_ARCHITECTURE" and "attention over 8 tokens only" in str(error)


@pytest.mark.slow(reason="exports models of transformers")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_decoder_keeps_its_cache(tmp_path: Path, strict: bool) -> None:
    folder = write_config(tmp_path, "llama")
    source = ModelSource.huggingface(folder, logits="all")
    program = torch.export.export(
        source.methods["forward"],
        source.example_inputs["forward"],
        dynamic_shapes=source.dynamic_shapes["forward"],
        strict=strict,
    )
    changed = program.run_decompositions().graph_signature.buffers_to_mutate
    assert sorted(changed.values()) == ["keys_0", "keys_1", "values_0", "values_1"]
    assert continued(program.module(), PROMPT, 8) == expected(original(folder), PROMPT, 8)


def test_random_weights_are_those_of_a_seed_and_said_to_be_random(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    lines: list[str] = []
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, same, other = (
        ModelSource.huggingface(folder, seed=seed, say=lines.append).methods["forward"].state_dict() for seed in (0, 0, 4)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.lm_head.weight"], other["model.lm_head.weight"])
    assert "random weights, seed 0" in lines[0] and "seed 4" in lines[2]
    assert torch.equal(before, torch.random.get_rng_state()), "the user's generator is not touched"


@pytest.mark.remedy("TOO_MANY_RANDOM_WEIGHTS")
def test_a_model_of_billions_of_random_weights_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    large = {"hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126, "vocab_size": 128_256}
    folder = write_config(tmp_path, "llama", **large)
    with pytest.raises(EtfarmError, match=r"4\d\d,\d{3},\d{3},\d{3} parameters, 1\d{3}\.\d GB: at most 2,000,000,000") as refused:
        ModelSource.huggingface(folder)
    assert refused.value.reason == "TOO_MANY_RANDOM_WEIGHTS" and "max_parameters=4" in refused.value.remedy
    count = sum(value.numel() for value in original(write_config(tmp_path, "qwen2")).parameters())
    with pytest.raises(EtfarmError, match=f"{count:,} parameters"):
        ModelSource.huggingface(tmp_path / "qwen2", max_parameters=count - 1)
    assert ModelSource.huggingface(tmp_path / "qwen2", max_parameters=count).methods
    spec = resolve(f"hf:{tmp_path / 'qwen2'}:max_parameters=9000000000")
    assert isinstance(spec, HuggingFaceFolder) and spec.options == (("max_parameters", 9_000_000_000),)
    assert spec.label == "qwen2:random"


@pytest.mark.remedy("BAD_CHECKPOINT")
def test_a_checkpoint_gives_the_weights(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    model = original(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    spec = resolve(f"hf:{folder}")
    assert isinstance(spec, HuggingFaceFolder) and spec.label == "llama"
    loaded = load_source(spec).methods["forward"].state_dict()
    assert torch.equal(loaded["model.lm_head.weight"], model.lm_head.weight)

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    lines: list[str] = []
    ModelSource.huggingface(folder, say=lines.append)
    assert "does not use these weights of the checkpoint: model.layers.1." in lines[-1]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    error = refusal(f"hf:{folder}")
    assert error.reason == "BAD_CHECKPOINT" and "lacks model.layers.2." in str(error)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "checkpoint cannot be loaded" in str(refusal(f"hf:{folder}"))


@pytest.mark.remedy("REMOTE_CODE_REFUSED")
def test_code_of_a_folder_is_not_executed(tmp_path: Path) -> None:
    codes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    foreign = write_config(tmp_path, "llama", model_type="foreign", auto_map=codes).rename(tmp_path / "foreign")
    native = write_config(tmp_path, "llama", auto_map=codes)
    for folder in (foreign, native):
        (folder / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    assert refusal(f"hf:{foreign}").reason == "REMOTE_CODE_REFUSED"
    lines: list[str] = []
    assert "forward" in ModelSource.huggingface(native, say=lines.append).methods
    assert "not executed" in lines[0] and not (tmp_path / "executed").exists()
    (tmp_path / "own.py").write_text("import torch\ndef net(): return torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)\n")
    assert load_source(resolve(f"{tmp_path / 'own.py'}:net")).methods  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("vit", "LlamaForCausalLM"),
        ("vit", "AutoModelForCausalLM"),
        ("llama", "AutoModelForImageClassification"),
        ("bert", "AutoModel"),
    ],
)
def test_transformers_never_asks_to_confirm_code_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, named: str
) -> None:
    codes = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoModelForImageClassification"), "code.Model")
    folder = write_config(tmp_path, kind, architectures=[named], auto_map=codes)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    error = refusal(f"hf:{folder}")
    assert (error.reason, asked, (tmp_path / "executed").exists()) == ("UNSUPPORTED_ARCHITECTURE", [], False)
    assert f"no such class of '{kind}' models" in str(error)


ENCODER = """
import torch, transformers
def encoder():
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1)
    return transformers.T5EncoderModel(config).eval(), (torch.ones(1, 4, dtype=torch.long),)
"""


@pytest.mark.remedy("UNSUPPORTED_ARCHITECTURE")
@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("t5", {}, "an encoder and a decoder"),
        ("llama", {"architectures": ["PreTrainedModel"]}, "has no such class"),
        ("llama", {"architectures": ["pipeline"]}, "has no such class"),
        ("llama", {"hidden_act": "no_such_function"}, "transformers does not know 'no_such_function'"),
        ("llama", {"vocab_size": -1}, "it cannot be created"),
        ("llama", {"max_position_embeddings": "x"}, "'max_position_embeddings'"),
        ("mamba", {}, "cache"),
        ("llama", {"model_type": "no_such_model"}, "cannot read its configuration"),
        ("bert", {"architectures": ["NoSuchModel"]}, "has no such class"),
        ("llama", {"hidden_size": 63}, "cannot"),
    ],
)
def test_what_cannot_be_made_up_is_refused_with_the_reason(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    error = refusal(f"hf:{write_config(tmp_path, kind, **changes)}")
    assert error.reason == "UNSUPPORTED_ARCHITECTURE" and words in str(error)
    (tmp_path / "own.py").write_text(ENCODER)
    assert load_source(resolve(f"{tmp_path / 'own.py'}:encoder")).methods  # type: ignore[arg-type]


def test_the_librarys_options_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(EtfarmError, match="dtype must be one of float32") as refused:
        ModelSource.huggingface(write_config(tmp_path, "llama"), dtype="int8")
    assert refused.value.reason == "BAD_MODEL_SOURCE"


@pytest.mark.parametrize("tokens", [4, CONTEXT + 1])
def test_a_context_must_fit_the_model(tmp_path: Path, tokens: int) -> None:
    error = refusal(f"hf:{write_config(tmp_path, 'llama')}:max_context_tokens={tokens}")
    assert error.reason == "BAD_MODEL_SOURCE" and "8 to 64" in str(error)


@pytest.mark.slow(reason="exports models of transformers")
@pytest.mark.parametrize(("kind", "shape"), [("bert", (1, 31)), ("vit", (1, 3, 32, 32))])
def test_a_model_without_a_cache_gets_inputs_of_its_configuration(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    folder = write_config(tmp_path, kind)
    source = ModelSource.huggingface(folder)
    assert source.example_inputs["forward"][0].shape == shape and len(source.calibration_inputs["forward"]) == 8
    exported = export_source(source, name=kind)
    assert exported.methods["forward"].output_names == ("logits",)
    assert refusal(f"hf:{folder}:max_context_tokens=64").reason == "BAD_MODEL_SOURCE"


def test_the_environment_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    import huggingface_hub.constants

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    ModelSource.huggingface(write_config(tmp_path, "llama"))
    assert "HF_HUB_OFFLINE" not in os.environ and huggingface_hub.constants.HF_HUB_OFFLINE is offline


@pytest.mark.remedy("EXTRA_MISSING")
def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = write_config(tmp_path, "llama")
    error = refusal(f"hf:{folder}")
    assert error.reason == "EXTRA_MISSING" and "pip install 'etfarm[huggingface]'" in str(error)
    monkeypatch.undo()
    assert ModelSource.huggingface(folder).methods


def test_a_transformers_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.57.6"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    error = refusal(f"hf:{write_config(tmp_path, 'llama')}")
    assert error.reason == "EXTRA_MISSING" and "(transformers 5.0 or later; 4.57.6 is installed)" in str(error)


def test_a_transformers_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    package = tmp_path / "site" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_library")
    (tmp_path / "site" / "transformers-5.1.0.dist-info").mkdir()
    (tmp_path / "site" / "transformers-5.1.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 5.1.0\n")
    code = "import sys; from etfarm.client.export import ModelSource; ModelSource.huggingface(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code, str(write_config(tmp_path, "llama"))]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "(transformers cannot be imported: No module named 'no_such_library')" in ended.stderr


def test_a_config_of_a_much_larger_model_than_the_checkpoints_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """transformers would allocate the weights that are missing."""
    folder = write_config(tmp_path, "llama", hidden_size=400_000, intermediate_size=400_000)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EtfarmError, match=r"[\d,]{15,} parameters, and the checkpoint \d+ bytes") as refused:
        ModelSource.huggingface(folder)
    assert refused.value.reason == "BAD_CHECKPOINT"
