"""The options of a measurement, each declared once for the command line, the page's form, the library and the server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from etfarm.wire.options import Option, Range, option, options_of


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """How a benchmark measures. Its attributes are options of `etfarm bench`, whose help describes them.

    Those that `Measurement` has are a field of it with the same name. Those without `with_generation` are refused beside
    `--generate`.
    """

    # fmt: off
    cores: str = option("--cores", "big, little, or cpus as 0-3.", default="", metavar="C", with_generation=True)
    # Agents keep 1,000,000 samples of all runs if a job sets no `max_samples`.
    iterations: int | None = option(
        "--iterations", "Minimum number of timed iterations.",
        read=int, metavar="N", range=Range(1, 1_000_000), without="100", label="Iterations")
    warmup: int | None = option(
        "--warmup", "Number of warm-up runs.", read=int, metavar="N", range=Range(0, 10_000_000), without="until steady")
    # Also the maximum, if it is longer than 60.
    min_time_s: float | None = option(
        "--min-time", "Minimum seconds of timed iterations.", read=float, metavar="S", range=Range(0, 10_000_000), without="1")
    # Fresh processes show how much the median varies between runs.
    repeat: int | None = option(
        "--repeat", "Measure in N fresh processes, one after the other.",
        read=int, metavar="N", range=Range(1, 50), without="1", label="Repeats", with_generation=True)
    interleave: bool = option(
        "--interleave", "Measure the candidates in turns, and compare each with the first.",
        default=False, label="Measure the recipes in turns")
    profile: bool = option("--no-profile", "No traced pass, so no operators.", default=False, with_generation=True)
    # A result holds 1,000 of them. The traced pass ends after about 20 s.
    trace_iterations: int | None = option(
        "--trace-iterations", "Minimum number of traced iterations.",
        read=int, metavar="N", range=Range(1, 1_000), without="30", with_generation=True)
    numerics: bool = option(
        "--numerics", "Also compare each operator's outputs, in a separate program and run.",
        default=False, label="Compare each operator's outputs")
    priority: int = option(
        "--priority", "Jobs with a higher priority run first.",
        default=0, read=int, metavar="P", range=Range(-100, 100), label="Priority", with_generation=True)
    # fmt: on


FIELDS: Final[dict[str, Option]] = dict(
    zip((each.name for each in fields(MeasurementOptions)), options_of(MeasurementOptions), strict=True)
)
"""The options by attribute."""
RANGES: Final[dict[str, Range]] = {name: each.range for name, each in FIELDS.items() if each.range is not None}
"""The ranges of numbers by attribute."""
WITH_GENERATION: Final = frozenset(
    {"generation", "max_time_s"}.union(
        each.name if each.flag.startswith("--no-") else name for name, each in FIELDS.items() if each.with_generation
    )
)
"""The fields of Measurement, and of JobSpec, that can be combined with `generation`; others of Measurement are refused."""
