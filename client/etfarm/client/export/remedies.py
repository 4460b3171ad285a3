"""What to change in a model that torch.export refuses. Standard library only."""

from __future__ import annotations

import re
from typing import Final

GRADIENTS: Final = (
    "Under torch.enable_grad(), compute v = x.detach().clone().requires_grad_(True) and torch.autograd.grad(f(v).sum(), v)[0]."
)
"""Remedy for gradients by torch.func."""
DATA: Final = "Write to the tensor in place: `with torch.no_grad(): tensor.copy_(value)` instead of `tensor.data = value`."
"""Remedy for assignments to `.data`."""

INDEX: Final = (
    "In functions of scan, map and cond, do not index with a number from .item(), neither theirs nor one from outside: index "
    "with the tensor, w.index_select(0, i.reshape(1))[0] for w[i.item()], and write with torch.where(torch.arange(n) == i, new, "
    "old)."
)
"""Remedy for numbers that depend on values in the functions of control flow."""

PADDING: Final = (
    "Pad with torch.nn.functional.pad, whose pairs of numbers begin with the last dim: pad(y, (0, 0, 0, 16 - n)) for "
    "torch.cat([y, torch.zeros(1, 16 - n, 8)], 1). Or give the dim a range in which that tensor always has a "
    "size of 2 or more there."
)
"""Remedy for tensors that are joined and that may be empty."""

PT2E_INSTEAD: Final = "Use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel."
"""Remedy for weights that torchao quantizes for a recipe, and that cannot be."""

_QUANTIZED_WEIGHT: Final = re.compile(
    r"Unable to cast NotImplemented to Tensor|Tensor dispatch: attempting to run unimplemented operator"
)

_REMEDIES: Final = (
    (
        re.compile(r"torch\.qu?int\d|quantized nyi|torch\.classes\.(?:quantized|rnn)\W|quantized::\w"),
        "ExecuTorch has no tensors of PyTorch's quantized dtypes, as torch.ao.quantization and torchvision.models.quantization "
        "give. Give the model in fp32, and quantize it with a recipe, such as xnnpack_pt2e_int8_static_per_channel.",
    ),
    (
        re.compile(r"SparseTensorImpl|[Ss]parse(?:Csr|Csc|Bsr|Bsc)|layout.*torch\.sparse"),
        "ExecuTorch has no sparse tensors: compute with dense ones, as x.to_dense() gives.",
    ),
    (
        re.compile(r"Tensor must have a (?:stride|storage_offset) divisible by 2|view_as_complex"),
        "ExecuTorch has no complex numbers: compute real and imaginary parts separately.",
    ),
    (
        re.compile(r"SerializeError.*while_loop", re.DOTALL),
        "ExecuTorch has no torch.while_loop: unroll it, or choose with torch.where.",
    ),
    (
        re.compile(r"SerializeError.*Failed serializing node set_\b", re.DOTALL),
        DATA,
    ),
    (
        re.compile(r"fake tensor in the exported program constant's list"),
        f"{DATA} The same holds for tensor.data.copy_(value). In torch.vmap, write vector @ matrix.t() instead of "
        "matrix @ vector.",
    ),
    (
        re.compile(r"Constant tensor lifted_tensor_\d+ is not in the constants dictionary"),
        "In an operator of your own, create no tensors from numbers: compute with the number, or write torch.full((), 2.0) for "
        "torch.tensor(2.0).",
    ),
    (
        re.compile(r"leaf Variable that requires grad .*in-place operation"),
        "Write to weights in a block `with torch.no_grad():`.",
    ),
    (
        re.compile(r"AttributeError: 'Tensor' object has no attribute 'constant'"),
        GRADIENTS,
    ),
    (
        re.compile(r"is not tracked with proxy|Attempted to wrap unbacked SymInt|SerializeError.*not in _SYM_OPS", re.DOTALL),
        INDEX,
    ),
    (
        re.compile(r"outs_to_grad length \(\d+\) != tangents length"),
        "A scan with weights carries no integers: give it the numbers of the steps to go through, scan(step, h, (x, "
        "torch.arange(n))), and index with w.index_select(0, i.reshape(1))[0].",
    ),
    (
        re.compile(r"SerializeError"),
        "In branches and loops, use no tensors that they create from numbers: create those outside, or as buffers.",
    ),
    (
        re.compile(r"cond's output stride"),
        "Give what a convolution returns in a branch of torch.cond its sizes again, y.view(1, 4, 6, 6), or compute both branches "
        "and choose with torch.where.",
    ),
    (
        re.compile(r"branches?\W* output", re.DOTALL),
        "The branches of torch.cond must return tensors of the same dtype, and contiguous alike: end each with "
        ".to(dtype).contiguous().",
    ),
    (
        re.compile(r"Encountered aliasing during higher order op tracing"),
        "A branch or loop must not return what it takes, or a part of it: return a copy, v.clone(). Nor must two of the tensors "
        "that it takes share memory: clone such parts before it, a = self.w[0].clone().",
    ),
    (
        re.compile(r"UncapturedHigherOrderOpError.*Failed to convert args/kwargs to proxy", re.DOTALL),
        "torch.export takes no layer within a branch or loop whose activations torchao quantizes to int8: quantize those with "
        "Int8WeightOnlyConfig, or leave them out with the filter of quantize_.",
    ),
    (
        re.compile(r"UncapturedHigherOrderOpError"),
        "Branches and loops return new values only: return the new value of a buffer from each branch, and write it outside.",
    ),
    (
        re.compile(r"(?:DynamicOutputShape|DataDependentOutput|UnsupportedOperator)Exception|PendingUnbackedSymbolNotFound"),
        "torch.export does not know the shape of what this operator returns: write that line with other operators.",
    ),
    (
        re.compile(r"integer from data-dependent expression.*batch_sizes|zeros\(\): argument 'size'.*Fake", re.DOTALL),
        "Programs have no packed sequences: give the layer the padded sequences, and zero its outputs beyond the lengths with "
        "torch.where(torch.arange(n) < lengths[:, None], ...). That is right for one direction, and not for the last states.",
    ),
    (
        re.compile(r"Could not extract specialized integer from data-dependent expression"),
        "That line needs a number that depends on values. An index may be a tensor of one element in place of a number: "
        "self.cache[self.pos.reshape(1)] = x, or, for a slice of n from there, "
        "self.cache[self.pos + torch.arange(n)] = x; give other numbers as constants, such as num_classes of one_hot.",
    ),
    (
        re.compile(r"unsupported format string passed to Sym(?:Float|Int)\.__format__"),
        "A program cannot write values into text: put that line under `if not torch.compiler.is_exporting():`.",
    ),
    (
        re.compile(r"\.numpy\(\) is not supported for tensor subclasses"),
        "A program cannot call NumPy: write that line with functions of torch, such as torch.sin for np.sin.",
    ),
    (
        re.compile(r"TypeError: missing a required argument"),
        "Give keyword arguments as example_kwargs: a factory may return ModelSource.of(module, inputs, example_kwargs={...}).",
    ),
    (
        re.compile(r"AssertionError: TODO\Z"),
        "A program cannot return a boolean that depends on values: return the tensor, without .item() or bool().",
    ),
    (
        _QUANTIZED_WEIGHT,
        "torchao quantized a weight for an operator that its tensors lack: leave that layer out with the filter of quantize_.",
    ),
)
"""Remedies by the name and message of an exception of torch 2.13."""


def lacks_operator(error: Exception) -> bool:
    """Return whether a quantized weight of torchao was given to an operator that its tensors lack."""
    return _QUANTIZED_WEIGHT.search(f"{type(error).__name__}: {error}") is not None


def remedy_of(name: str, text: str) -> str:
    """Return what to change in the model, by the name of an exception's type and its message; empty if that is not known."""
    return next((remedy for pattern, remedy in _REMEDIES if pattern.search(f"{name}: {text}")), "")
