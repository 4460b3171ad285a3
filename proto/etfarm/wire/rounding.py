"""What rounding explains: differences between two executions of one program, and of a program from its reference."""

from __future__ import annotations

import math
from typing import Final

RELATIVE: Final = {"float64": 2.0**-44, "float32": 2.0**-16, "float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Largest difference by dtype, relative to the largest magnitude of the output.

Threads that add in another order change the last bits of a sum, and later layers amplify that: float32 networks differ by 1e-7 to
1e-6 between numbers of threads. The limits are 128 to 256 units in the last place for float64 and float32, and 8 for the halves,
whose sums are computed in float32 and rounded once for each operator.
"""


LEAST_SQNR_DB: Final = {"float16": 30.0, "bfloat16": 20.0}
"""Minimum SQNR in dB of a correct program without quantization by the dtype of its output, where that is not WIDE_SQNR_DB.

Each sum is rounded to the dtype: outputs of float16 mostly have 45 to 65 dB, of bfloat16 30 to 45, of float32 over 100.
"""

WIDE_SQNR_DB: Final = 40.0
"""The same of float32 and float64."""


def least_sqnr_db(dtype: str) -> float:
    """Return the SQNR in dB that a correct program without quantization has at least, by the dtype of its output."""
    return LEAST_SQNR_DB.get(dtype, WIDE_SQNR_DB)


def tolerance(dtype: str, magnitude: float) -> float | None:
    """Return the largest absolute difference that rounding explains; None for a dtype that does not round, such as integers.

    Args:
        dtype: the output's dtype, such as `float32`.
        magnitude: the largest finite absolute value of the output.
    """
    relative = RELATIVE.get(dtype)
    return None if relative is None or not math.isfinite(magnitude) else relative * magnitude
