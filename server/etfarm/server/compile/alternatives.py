"""What computes the same as operators that ExecuTorch's portable kernels or the screen's list lack. Stdlib only."""

from __future__ import annotations

import re
from typing import Final

_INSTEAD: Final = tuple(
    (re.compile(rf"::_*(?:{operators})(?![a-z0-9])_*"), words)
    for operators, words in (
        ("(?:bitwise_left_|l)shift", "x * 2**n for x << n"),
        ("(?:bitwise_right_|r)shift", "torch.div(x, 2**n, rounding_mode='floor') for x >> n"),
        ("fake_quantize\\w*", "the model without fake quantization, which a pt2e recipe quantizes"),
        (
            "sort|argsort|msort",
            "torch.topk(x, x.shape[dim], dim, largest=False) for torch.sort(x, dim), with largest=True for descending=True, "
            "which may swap equal values; to keep their order as stable=True does, torch.topk(x.long() * n + torch.arange(n), n, "
            "largest=False).indices for the indices of integers or bools along the last dim of size n, or "
            "torch.topk(x.long() * n - torch.arange(n), n).indices for descending=True",
        ),
        ("kthvalue", "torch.topk(x, k, dim, largest=False).values.select(dim, -1) for the k-th value"),
        (
            "median",
            "torch.topk(x, (x.shape[dim] + 1) // 2, dim, largest=False).values.select(dim, -1) for the median",
        ),
        (
            "quantile",
            "torch.lerp(s.select(dim, i), s.select(dim, min(i + 1, n - 1)), q * (n - 1) - i) for torch.quantile(x, q, dim), with "
            "s = torch.topk(x, n, dim, largest=False).values and i = int(q * (n - 1)) for x.shape[dim] = n and each number q",
        ),
        (
            "put",
            "x.flatten().scatter(0, index, values).view(x.shape) for x.put(index, values), or scatter_add for accumulate=True",
        ),
        (
            "as_strided_scatter",
            "x.flatten().scatter(0, index.flatten(), values.flatten()).view(x.shape) for writing values to torch.as_strided(x, "
            "size, stride, offset), with index = torch.as_strided(torch.arange(x.numel()), size, stride, offset) as a buffer",
        ),
        ("tril_indices|triu_indices", "a buffer, which __init__ registers, for torch.tril_indices and torch.triu_indices"),
        (
            "scatter_reduce|index_reduce",
            "scatter_add for sums, and torch.where(mask, values, -torch.inf).amax(dim) for maxima",
        ),
        (
            "rand_like|randint\\w*|randperm|multinomial|exponential|normal\\w*|rrelu\\w*|poisson|geometric|cauchy|log_normal",
            "an input of the model for the random numbers",
        ),
        (
            "searchsorted|bucketize",
            "(x.unsqueeze(-1) > boundaries).sum(-1) for torch.bucketize(x, boundaries), with >= for right=True",
        ),
        ("bincount", "torch.zeros(n, dtype=x.dtype).scatter_add(0, x, torch.ones_like(x)) for torch.bincount(x, minlength=n)"),
        (
            "histc",
            "((x.flatten() >= low[:, None]) & (x.flatten() < high[:, None])).sum(1) with the bins' ends for torch.histc, whose "
            "last bin has its upper end too",
        ),
        ("masked_select", "torch.where(mask, x, 0), which keeps the shape"),
        ("cumprod", "torch.exp(torch.cumsum(torch.log(x), dim)) for cumprod of positive values"),
        (
            "logcumsumexp",
            "torch.logsumexp(torch.where(torch.ones(n, n, dtype=torch.bool).tril(), x.unsqueeze(-2), -torch.inf), -1) for "
            "logcumsumexp along the last dim of size n",
        ),
        (
            "cummax|cummin",
            "torch.where(torch.ones(n, n, dtype=torch.bool).tril(), x.unsqueeze(-2), -torch.inf).max(-1) for torch.cummax(x, -1) "
            "of the last dim of size n, which may have other indices of equal values, and torch.inf and min(-1) for torch.cummin",
        ),
        (
            "(?:linalg_)?(?:inv|inverse|solve|det|slogdet|svd|svdvals|eig\\w*|cholesky|qr|lu\\w*|matrix_exp|pinv|lstsq)(?:_ex)?",
            "an input or a buffer for what this decomposition of a matrix gives, and compute it outside of the model",
        ),
        ("max_pool3d\\w*", "F.max_pool2d of x.flatten(1, 2) and then F.max_pool1d along the depth for max_pool3d"),
        (
            "avg_pool3d",
            "F.avg_pool2d of x.flatten(1, 2) and then F.avg_pool1d along the depth for avg_pool3d; x / (k + alpha * y) ** beta "
            "for F.local_response_norm(x, n), with y = F.avg_pool1d(F.pad((x * x).flatten(2).transpose(1, 2), "
            "(n // 2, (n - 1) // 2)), n, 1).transpose(1, 2).reshape(x.shape)",
        ),
        (
            "adaptive_max_pool[123]d",
            "x.amax((2, 3), keepdim=True) for F.adaptive_max_pool2d(x, 1), for other output sizes, where that leaves no rest, "
            "max pools with kernel_size = stride = input size // output size",
        ),
        (
            "upsample_(?:bilinear|bicubic)2d_aa",
            "rows @ x @ columns.T, with rows = F.interpolate(torch.eye(h)[None, None], (new_h, h), mode=mode, "
            "antialias=True)[0, 0] and columns alike as buffers, for F.interpolate with antialias=True",
        ),
        ("hypot", "torch.sqrt(x * x + y * y) for torch.hypot(x, y)"),
        ("copysign", "torch.where(y < 0, -x.abs(), x.abs()) for torch.copysign(x, y)"),
        (
            "embedding_bag\\w*",
            "F.embedding(x, weight).mean(1) for F.embedding_bag(x, weight) with mode='mean', its default, .sum(1) for 'sum' and "
            ".amax(1) for 'max', with a bag in each row of x, and without padding_idx and per_sample_weights",
        ),
        ("round", "(x * 10**n).round() / 10**n for x.round(decimals=n)"),
        ("trilinear", "torch.einsum('bi,kij,bj->bk', x, weight, y) for F.bilinear(x, y, weight)"),
    )
)


def use_instead(operators: str) -> str:
    """Return what to replace operators without a kernel with, as the beginning of a remedy.

    Args:
        operators: their names in a text, such as `aten::sort, aten::histc`.
    """
    known = [words for pattern, words in _INSTEAD if pattern.search(operators)]
    return f"Use {' and '.join(known)}" if known else "Use other operators"
