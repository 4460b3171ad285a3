"""What computes the same as operators without a kernel: ExecuTorch runs it, with the values that eager PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from executorch.exir import to_edge_transform_and_lower  # noqa: E402
from executorch.runtime import Runtime  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from etfarm.server.compile.alternatives import use_instead  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="lowers a program for each operator")]

X: Final = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
CUBE: Final = torch.randn(2, 3, 8, 8, 8, generator=torch.Generator().manual_seed(0))
PLACES: Final = torch.tensor([[0, 1, 2, 0, 1, 2, 0]]).expand(4, 7)
BOUNDARIES: Final = torch.tensor([-1.0, 0.0, 1.0])
KEYS: Final = (torch.arange(80).reshape(2, 40) * 7 % 3 + 99).to(torch.int8)
"""Integers with many equal ones, whose products do not fit into their dtype."""
INDEX, REPEATED = torch.tensor([0, 5, 27]), torch.tensor([5, 5, 27])
STRIDED: Final = torch.as_strided(torch.arange(28), (2, 3), (7, 2), 1)
LOWER, UPPER = torch.tril_indices(4, 4), torch.triu_indices(4, 4)
VALUES: Final = torch.tensor([1.0, 2.0, 3.0])
WEIGHT: Final = torch.ones(2, 7, 7)
SCAN: Final = torch.stack([torch.linspace(0, 200, 256), torch.linspace(200, -200, 256)])
"""Logarithms as a scan has them: the exponential function of a row is 0 or infinite for most of it."""
EDGES: Final = torch.arange(-2.0, 3.0)[:, None]
"""Bins of a histogram, whose last one has its upper end as well."""


def maxima(x: Tensor) -> Tensor:
    return torch.where(F.one_hot(PLACES, 3).bool(), x.unsqueeze(-1), -torch.inf).amax(1)


def in_order(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return torch.topk(x.long() * n + torch.arange(n), n, largest=False).indices


def quantile(x: Tensor, q: float, dim: int) -> Tensor:
    n = x.shape[dim]
    s, i = torch.topk(x, n, dim, largest=False).values, int(q * (n - 1))
    return torch.lerp(s.select(dim, i), s.select(dim, min(i + 1, n - 1)), q * (n - 1) - i)


def by_depth(pool_2d: Callable[..., Tensor], pool_1d: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def pool(x: Tensor) -> Tensor:
        flat = pool_2d(x.flatten(1, 2), 2).unflatten(1, x.shape[1:3])
        depth = pool_1d(flat.permute(0, 1, 3, 4, 2).flatten(1, 3), 2)
        return depth.unflatten(1, (x.shape[1], *flat.shape[3:])).permute(0, 1, 4, 2, 3)

    return pool


def response_norm(cube: Tensor, n: int = 2) -> Tensor:
    x = cube[0]
    y = F.avg_pool1d(F.pad((x * x).flatten(2).transpose(1, 2), (n // 2, (n - 1) // 2)), n, 1).transpose(1, 2).reshape(x.shape)
    return x / (1 + 1e-4 * y) ** 0.75


def log_of_sums(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return torch.logsumexp(torch.where(torch.ones(n, n, dtype=torch.bool).tril(), x.unsqueeze(-2), -torch.inf), -1)


def resizing(size: int, new: int) -> Tensor:
    return F.interpolate(torch.eye(size)[None, None], (new, size), mode="bicubic", antialias=True)[0, 0]


def strided(x: Tensor) -> Tensor:
    y = x * 1
    torch.as_strided(y, (2, 3), (7, 2), 1).mul_(10)
    return y


def scattered(x: Tensor) -> Tensor:
    values = torch.as_strided(x, (2, 3), (7, 2), 1) * 10
    return x.flatten().scatter(0, STRIDED.flatten(), values.flatten()).view(x.shape)


def extremes(x: Tensor, limit: float) -> Tensor:
    n = x.shape[-1]
    return torch.where(torch.ones(n, n, dtype=torch.bool).tril(), x.unsqueeze(-2), limit)


ROWS, COLUMNS = resizing(4, 3), resizing(8, 5)

CASES: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any], Tensor, str]]] = {
    "sort": (lambda x: torch.sort(x, 1)[0], lambda x: torch.topk(x, x.shape[1], 1, largest=False)[0], X, "torch.topk"),
    "argsort": (lambda x: torch.argsort(x, 0), lambda x: torch.topk(x, x.shape[0], 0, largest=False).indices, X, "torch.topk"),
    "descending sort": (
        lambda x: torch.sort(x, 0, descending=True)[0], lambda x: torch.topk(x, x.shape[0], 0, largest=True)[0],
        X, "with largest=True for descending=True, which may swap equal values",
    ),
    **{
        f"stable sort of {keys.dtype}": (
            lambda x: torch.argsort(x, dim=-1, stable=True), in_order, keys,
            "torch.topk(x.long() * n + torch.arange(n), n, largest=False).indices",
        )
        for keys in (KEYS, KEYS.int(), KEYS > 100)
    },
    "stable descending sort": (
        lambda x: torch.argsort(x, dim=-1, stable=True, descending=True),
        lambda x: torch.topk(x.long() * x.shape[-1] - torch.arange(x.shape[-1]), x.shape[-1]).indices,
        KEYS, "torch.topk(x.long() * n - torch.arange(n), n).indices for descending=True",
    ),
    "kthvalue": (
        lambda x: torch.kthvalue(x, 2, 1).values, lambda x: torch.topk(x, 2, 1, largest=False).values.select(1, -1), X, "k-th",
    ),
    "median": (
        lambda x: torch.median(x, 0).values,
        lambda x: torch.topk(x, (x.shape[0] + 1) // 2, 0, largest=False).values.select(0, -1), X, "for the median",
    ),
    **{
        f"quantile {q} along {dim}": (
            lambda x, q=q, dim=dim: torch.quantile(x, q, dim), lambda x, q=q, dim=dim: quantile(x, q, dim),
            X, "torch.lerp(s.select(dim, i), s.select(dim, min(i + 1, n - 1)), q * (n - 1) - i)",
        )
        for q, dim in ((0.25, 0), (0.5, 1), (1.0, 1))
    },
    "put": (
        lambda x: x.put(INDEX, VALUES), lambda x: x.flatten().scatter(0, INDEX, VALUES).view(x.shape), X, "for x.put(index",
    ),
    "put, which adds": (
        lambda x: x.put(REPEATED, VALUES, accumulate=True),
        lambda x: x.flatten().scatter_add(0, REPEATED, VALUES).view(x.shape), X, "scatter_add for accumulate=True",
    ),
    "tril_indices": (lambda x: x[*torch.tril_indices(4, 4)], lambda x: x[*LOWER], X, "a buffer, which __init__ registers"),
    "triu_indices": (lambda x: x[*torch.triu_indices(4, 4)], lambda x: x[*UPPER], X, "a buffer, which __init__ registers"),
    "scatter_reduce": (
        lambda x: torch.zeros(4, 3).scatter_reduce(1, PLACES, x, "sum"), lambda x: torch.zeros(4, 3).scatter_add(1, PLACES, x),
        X, "scatter_add for sums",
    ),
    "scatter_reduce of maxima": (
        lambda x: torch.zeros(4, 3).scatter_reduce(1, PLACES, x, "amax", include_self=False), maxima, X, "amax(dim) for maxima",
    ),
    "index_reduce": (
        lambda x: torch.zeros(4, 3).index_reduce(1, PLACES[0], x, "amax", include_self=False), maxima, X, "amax(dim) for maxima",
    ),
    "bucketize": (lambda x: torch.bucketize(x, BOUNDARIES), lambda x: (x.unsqueeze(-1) > BOUNDARIES).sum(-1), X, "boundaries"),
    "bucketize with right=True": (
        lambda x: torch.bucketize(x, BOUNDARIES, right=True), lambda x: (x.unsqueeze(-1) >= BOUNDARIES).sum(-1),
        torch.tensor([-1.0, -0.5, 0.0, 1.0]), "with >= for right=True",
    ),
    "searchsorted on the right": (
        lambda x: torch.searchsorted(BOUNDARIES, x, right=True), lambda x: (x.unsqueeze(-1) >= BOUNDARIES).sum(-1),
        torch.tensor([-1.0, -0.5, 0.0, 1.0]), "with >= for right=True",
    ),
    "bincount": (
        lambda x: torch.bincount(x, minlength=5), lambda x: torch.zeros(5, dtype=x.dtype).scatter_add(0, x, torch.ones_like(x)),
        torch.tensor([0, 3, 3, 4]), "torch.zeros(n, dtype=x.dtype).scatter_add(0, x, torch.ones_like(x))",
    ),
    "histc": (
        lambda x: torch.histc(x, 4, -2, 2), lambda x: ((x.flatten() >= EDGES[:-1]) & (x.flatten() < EDGES[1:])).sum(1),
        X, "for torch.histc",
    ),
    "masked_select": (
        lambda x: torch.masked_select(x, x > 0).sum(), lambda x: torch.where(x > 0, x, 0).sum(), X, "torch.where(mask, x, 0)",
    ),
    "cumprod": (lambda x: torch.cumprod(x, 1), lambda x: torch.exp(torch.cumsum(torch.log(x), 1)), X.abs() + 0.1, "positive"),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), log_of_sums, X, "for logcumsumexp"),
    "cummax": (lambda x: torch.cummax(x, 1)[0], lambda x: extremes(x, -torch.inf).max(-1)[0], X, "for torch.cummax"),
    "cummax of where": (lambda x: torch.cummax(x, 1)[1], lambda x: extremes(x, -torch.inf).max(-1)[1], X, "for torch.cummax"),
    "cummin": (lambda x: torch.cummin(x, 1)[0], lambda x: extremes(x, torch.inf).min(-1)[0], X, "for torch.cummin"),
    "as_strided, written to": (strided, scattered, X, "for writing values to torch.as_strided"),
    "logcumsumexp of a scan": (lambda x: torch.logcumsumexp(x, 1), log_of_sums, SCAN, "for logcumsumexp"),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), by_depth(F.max_pool2d, F.max_pool1d), CUBE, "for max_pool3d"),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), by_depth(F.avg_pool2d, F.avg_pool1d), CUBE, "for avg_pool3d"),
    "local_response_norm": (lambda x: F.local_response_norm(x[0], 2), response_norm, CUBE, "for F.local_response_norm(x, n)"),
    "adaptive_max_pool": (
        lambda x: F.adaptive_max_pool2d(x[:, 0], 4), lambda x: F.max_pool2d(x[:, 0], 2, 2), CUBE, "input size // output size",
    ),
    "interpolate": (
        lambda x: F.interpolate(x[0], (3, 5), mode="bicubic", antialias=True), lambda x: ROWS @ x[0] @ COLUMNS.T,
        torch.rand(1, 1, 2, 4, 8), "rows @ x @ columns.T",
    ),
    "hypot": (lambda x: torch.hypot(x, x + 1), lambda x: torch.sqrt(x * x + (x + 1) * (x + 1)), X, "torch.sqrt"),
    "copysign": (lambda x: torch.copysign(x, x - 1), lambda x: torch.where(x - 1 < 0, -x.abs(), x.abs()), X, "-x.abs()"),
    "round": (lambda x: x.round(decimals=1), lambda x: (x * 10**1).round() / 10**1, X, "for x.round(decimals=n)"),
    **{
        f"embedding_bag {mode}": (
            lambda x, mode=mode: F.embedding_bag(x, X, mode=mode), lambda x, instead=instead: instead(F.embedding(x, X)),
            torch.tensor([[0, 1], [2, 3]]), words,
        )
        for mode, instead, words in (
            ("mean", lambda rows: rows.mean(1), "F.embedding(x, weight).mean(1)"),
            ("sum", lambda rows: rows.sum(1), ".sum(1) for 'sum'"),
            ("max", lambda rows: rows.amax(1), ".amax(1) for 'max'"),
        )
    },
    "bilinear": (
        lambda x: F.bilinear(x, x + 1, WEIGHT), lambda x: torch.einsum("bi,kij,bj->bk", x, WEIGHT, x + 1), X, "torch.einsum",
    ),
}  # fmt: skip
"""A function, what is said to be used instead, an input, and words of the remedy."""


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def operators(function: Callable[..., Any], x: Tensor) -> str:
    """Return the operators of a function, as exported and after decomposition."""
    program = torch.export.export(Function(function), (x,))
    graphs = (program.graph, program.run_decompositions().graph)
    return ", ".join(str(node.target._schema.name) for graph in graphs for node in graph.nodes if hasattr(node.target, "_schema"))


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_to_be_used_instead_runs_with_equal_values(name: str) -> None:
    function, instead, x, words = CASES[name]
    remedy = use_instead(operators(function, x))
    assert remedy.startswith("Use ") and words in remedy
    lowered = to_edge_transform_and_lower(torch.export.export(Function(instead), (x,))).to_executorch()
    buffer = lowered.buffer  # the runtime does not copy it
    (output,) = Runtime.get().load_program(buffer).load_method("forward").execute([x])
    torch.testing.assert_close(output.float(), function(x).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (torch.rand_like, "random numbers"),
        (lambda x: x[:, torch.randperm(7)], "random numbers"),
        (lambda x: F.rrelu(x, training=True), "random numbers"),
        (lambda x: torch.linalg.inv(x[:, :4]), "outside of the model"),
        (lambda x: torch.linalg.svdvals(x), "outside of the model"),
        (torch.erfinv, "Use other operators"),
    ],
)
def test_values_that_only_the_host_computes_are_inputs(function: Callable[..., Any], words: str) -> None:
    assert words in use_instead(operators(function, X))
