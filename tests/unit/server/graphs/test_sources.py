"""The source rule: the innermost frame that is the user's, as the stack trace tells it."""

from __future__ import annotations

import pytest

from etfarm.server.graphs.sources import Source, common_module, is_users, module_of, source_of

TRACE = """  File "models/resnet.py", line 31, in forward
    y = self.conv2(y)
  File "torch/nn/modules/conv.py", line 565, in forward
    return self._conv_forward(input, self.weight, self.bias)
  File "<eval_with_key>.14", line 11, in forward
    conv2d = torch.ops.aten.conv2d.default(x)"""


def test_the_innermost_frame_outside_of_torch_is_taken_with_its_code() -> None:
    assert source_of(TRACE) == Source("models/resnet.py", 31, "y = self.conv2(y)")


def test_of_several_user_frames_the_innermost_is_taken() -> None:
    trace = 'File "a.py", line 1, in forward\n    return self.b(x)\n  File "b.py", line 2, in forward\n    return x + 1'
    assert source_of(trace) == Source("b.py", 2, "return x + 1")


def test_a_frame_without_code_has_none() -> None:
    marks = 'File "a.py", line 1, in forward\n    ~~~^^^\n'
    assert source_of('File "a.py", line 1, in forward') == Source("a.py", 1, "")
    assert source_of(marks) == Source("a.py", 1, "")
    assert source_of('File "a.py", line 1, in f\nFile "torch/b.py", line 2, in g\n    pass') == Source("a.py", 1, "")


@pytest.mark.parametrize("trace", [None, "", "no frames", 'File "<string>", line 1, in f\n    x', 'File "torch/a.py", line 1'])
def test_without_a_users_frame_there_is_no_source(trace: str | None) -> None:
    assert source_of(trace) is None


@pytest.mark.parametrize(
    "file",
    [
        "models/resnet.py",
        "torch_models/net.py",
        "/home/ada/torch/net.py",
        "/home/ada/executorch/net.py",
        "etfarm/client/export/demo_models/resnet8.py",
        "/src/client/etfarm/client/export/demo_models/resnet8.py",
        "/venv/lib/python3.11/site-packages/etfarm/client/export/demo_models/ds_cnn.py",
        "/venv/lib/python3.11/site-packages/torchvision/models/resnet.py",
        "C:\\models\\net.py",
        "executorch/examples/models/llama/llama_transformer.py",
        "/venv/lib/python3.11/site-packages/executorch/extension/llm/modules/kv_cache.py",
    ],
)
def test_a_users_file(file: str) -> None:
    assert is_users(file)


@pytest.mark.parametrize(
    "file",
    [
        "<eval_with_key>.14",
        "<ipython-input-3>",
        "torch/nn/modules/conv.py",
        "torchao/quantization/pt2e/x.py",
        "/venv/lib/python3.11/site-packages/torch/nn/functional.py",
        "C:\\venv\\Lib\\site-packages\\torch\\nn\\functional.py",
        "/usr/lib/python3/dist-packages/executorch/exir/x.py",
        "/usr/lib/python3.11/contextlib.py",
        "etfarm/client/export/eager.py",
        "/src/server/etfarm/server/compile/lower/quantize.py",
        "/venv/lib/python3.11/site-packages/etfarm/server/compile/lower/quantize.py",
    ],
)
def test_not_a_users_file(file: str) -> None:
    assert not is_users(file)


@pytest.mark.parametrize(
    ("stack", "module"),
    [
        (
            "L__self__,,__main__.Net;L__self___layer1,layer1,__main__.Block;L__self___conv,layer1.conv,torch.nn.Conv2d",
            "layer1.conv",
        ),
        ("L['self'],L['self'],net.Net;L['self'].fc,L['self'].fc,torch.nn.Linear", "fc"),
        ("L__self__,,__main__.Net", None),
        ("L__self__,,net.Net;k,layers.slice(0, 2, None).0,torch.nn.Linear", "layers.slice(0, 2, None).0"),
        ("", None),
        (None, None),
    ],
)
def test_the_module_is_the_innermost_of_the_stack(stack: str | None, module: str | None) -> None:
    assert module_of(stack) == module


def test_modules_share_their_deepest_parent() -> None:
    assert common_module(["a.b.c", "a.b.d", None]) == "a.b"
    assert common_module(["a.b", "a.bc"]) == "a"
    assert common_module(["a", "b"]) is None
    assert common_module([None, None]) is None
    assert common_module(["", "a.b", "a.b"]) is None, "the model itself"
