"""Checks of what an analysis child returned: it has read output of users' programs, so nothing in it is trusted."""

from __future__ import annotations

import math
from typing import Final

from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.workers.errors import BadWorkerAnswer
from etfarm.v1 import report_pb2
from etfarm.wire.generation import METRICS as GENERATION_METRICS

_MIN_NS: Final = 1e-3
_MAX_NS: Final = 2.0**63
"""Range of a run's median and of the ends of its interval, which are 0 or between samples: their logarithms stay small."""

_LEAST_RATE: Final = 1e-60
_MOST_RATE: Final = 1e60
"""Range of the numbers of generation and of the ends of their intervals, which lie far beyond the times if these differ by orders
of magnitude."""


def require_runs(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require the statistics of each run, or none if that part failed or the programs were interleaved.

    Raises:
        BadWorkerAnswer: their number is not that of the runs, or a median or an interval is not one of times.
    """
    expected = 0 if request.samples is None or request.blocks else max(1, len(request.runs))
    if len(report.runs) not in (0, expected):
        raise BadWorkerAnswer(f"The analysis child must return the statistics of {expected} runs, got {len(report.runs)}.")
    for run in report.runs:
        ends = run.p50_ci95_ns
        if not all(value == 0 or _MIN_NS <= value <= _MAX_NS for value in (run.p50_ns, *ends)):
            raise BadWorkerAnswer(f"The analysis child must return times of 0 or {_MIN_NS:g} to {_MAX_NS:g} ns for each run.")
        if len(ends) not in (0, 2) or list(ends) != sorted(ends):
            raise BadWorkerAnswer("The analysis child must return intervals of runs with two ends in ascending order.")


def require_generation(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require the numbers of each point and process of generation, or none if that part failed.

    Raises:
        BadWorkerAnswer: points or processes are missing, or a number or interval is impossible.
    """
    points, requested = report.generation.points, request.generation
    if not points:
        return
    if requested is None or len(points) != len(requested.prompt_tokens):
        raise BadWorkerAnswer("The analysis child must return the points of generation that were requested.")
    for point in points:
        if len(point.runs) != len(requested.processes) or len(point.token_ns) not in (0, requested.generated_tokens):
            raise BadWorkerAnswer("The analysis child must return each process and each token of generation.")
        if not all(0 <= time_ns <= _MAX_NS for time_ns in point.token_ns):
            raise BadWorkerAnswer(f"The analysis child must return times of 0 to {_MAX_NS:g} ns for each token.")
        for run in point.runs:
            for name, interval in GENERATION_METRICS.items():
                value, ends = getattr(run, name), getattr(run, interval)
                known = [value, *ends] if run.HasField(name) else []  # type: ignore[arg-type]
                if (not known and ends) or not all(_LEAST_RATE <= each <= _MOST_RATE for each in known):
                    raise BadWorkerAnswer(f"The analysis child must return numbers above 0 for `{name}`.")
                if len(ends) not in (0, 2) or list(ends) != sorted(ends):
                    raise BadWorkerAnswer(f"The analysis child must return intervals of `{name}` in ascending order.")


def require_encoders(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require the traced encoders of the request, each once.

    Raises:
        BadWorkerAnswer: there are others.
    """
    requested = [trace.method for trace in request.encoders or ()]
    returned = [encoder.method for encoder in report.generation.encoders]
    if len(set(returned)) < len(returned) or not set(returned) <= set(requested):
        raise BadWorkerAnswer("The analysis child must return the profile of each traced encoder once.")


_TEXT_NUMBERS: Final = {
    "top1_agreement": (0.0, 1.0), "sqnr_db": (-1e4, 300.0), "max_abs_error": (0.0, _MOST_RATE),
    "kl_divergence": (0.0, _MOST_RATE), "perplexity": (1.0, _MOST_RATE), "perplexity_ratio": (_LEAST_RATE, _MOST_RATE),
}  # fmt: skip
"""Ranges of the numbers of a GenerationReference."""


def require_text_accuracy(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require possible numbers of the accuracy of generation, if the child computed it.

    Raises:
        BadWorkerAnswer: a number is impossible, or there are other references than those of the request.
    """
    if not report.generation.HasField("accuracy"):
        return
    accuracy, scores = report.generation.accuracy, request.scores
    known = [reference.reference for reference in accuracy.references]
    if scores is None or known != sorted(set(known)) or any(not 0 < each <= report_pb2.REFERENCE_HOST for each in known):
        raise BadWorkerAnswer("The analysis child must return the accuracy of generation against each reference once.")
    if not 0 <= accuracy.perplexity_tokens <= scores.executed or (
        accuracy.HasField("perplexity") and not 1.0 <= accuracy.perplexity <= _MOST_RATE
    ):
        raise BadWorkerAnswer("The analysis child must return a perplexity of 1 or more, of the tokens that were executed.")
    for reference in accuracy.references:
        counts = (
            (reference.tokens, scores.executed), (reference.logits_tokens, len(scores.logits_after)),
            (reference.generated_tokens, scores.generated_tokens),
        )  # fmt: skip
        if any(not 0 <= count <= most for count, most in counts):
            raise BadWorkerAnswer("The analysis child must not compare more tokens than there are.")
        for name, (least, most) in _TEXT_NUMBERS.items():
            if reference.HasField(name) and not least <= getattr(reference, name) <= most:  # type: ignore[arg-type]
                raise BadWorkerAnswer(f"The analysis child must return a `{name}` of {least:g} to {most:g}.")
        difference = reference.first_difference
        if reference.HasField("first_difference") and not (
            0 <= difference.index < scores.generated_tokens and difference.gap >= 0 and math.isfinite(difference.gap)
        ):
            raise BadWorkerAnswer("The analysis child must return a generated token as the first that differs.")
