"""One clear sentence out of what torch and ExecuTorch raise. Stdlib only."""

from __future__ import annotations

import re

from etfarm.server.compile.refusals import StageFailed

_MAX = 400
_NOISE = re.compile(
    r"^(\s*|An error occurred when running .*|Exception:?|Traceback .*|={3,}.*|-{3,}.*|The following .*:|.*Original exception.*"
    r"|While executing .*|GraphModule: .*|Original traceback:|Use tlparse .*|For more information .*|\s*File \".*)$"
)
_PATH = re.compile(r"(/[\w.\-+@]+){2,}/?")

_REMEDIES = (
    ("out variant", "These operators have no ExecuTorch kernel: replace them, or register their out variants on the server."),
    ("SpecViolationError", "The model has an operator outside of ExecuTorch's core set; replace it or export in eval mode."),
    ("data-dependent", "Bound the value with torch._check, or take it out of the control flow."),
    ("complex", "ExecuTorch has no complex numbers: compute real and imaginary parts apart."),
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """The line of an exception's message that says what is wrong, at most 400 characters, without the server's paths.

    A wrapper ("An error occurred when running pass ...") is looked through to its cause.
    """
    seen = 0
    while error.__cause__ is not None and seen < 8 and str(error).lstrip().startswith("An error occurred when running"):
        error, seen = error.__cause__, seen + 1
    for line in str(error).splitlines():
        if not _NOISE.match(line):
            return _PATH.sub(lambda m: m[0].rstrip("/").rpartition("/")[2], line.strip())[:_MAX]
    return type(error).__name__


def stage_failed(stage: str, error: BaseException) -> StageFailed:
    """The user's error for what a stage of the pipeline raised."""
    text = f"{type(error).__name__} {error}"
    remedy = next((remedy for mark, remedy in _REMEDIES if mark.lower() in text.lower()), "")
    return StageFailed(stage, type(error).__name__, first_line(error), remedy)
